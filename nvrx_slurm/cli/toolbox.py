"""`nvrx`: the toolbox beside `nvrx-run`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

try:
    import click
except ModuleNotFoundError:  # pip install --no-deps
    sys.exit("nvrx needs three packages: pip install click pyyaml nvidia-ml-py")

from nvrx_slurm import __version__
from nvrx_slurm.errors import ExitCode, NvrxError

# Where each command is. `nvrx status` is asked often, and all of them together take half a second to import.
_GROUPS = {
    "Run": {
        "submit": "cli.submit:submit",
        "doctor": "cli.doctor:doctor",
    },
    "Watch": {
        "list": "views.runs:list_runs",
        "status": "views.status:status",
        "logs": "cli.logs:logs",
        "stacks": "cli.stacks:stacks",
    },
    "Explain": {
        "why": "views.why:why",
        "report": "views.report:report",
        "goodput": "views.goodput:goodput",
        "replay": "views.replay:replay",
    },
    "Administer": {
        "health": "cli.health:health",
        "metrics": "views.metrics:metrics",
    },
}
_COMMANDS = {name: where for group in _GROUPS.values() for name, where in group.items()}
_ALL = 1000  # characters: more than the first sentence of any command


class _Toolbox(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _GROUPS.items():
            commands = [self.get_command(ctx, name) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(_ALL))
                        for name, command in zip(names, commands, strict=True)
                        if command is not None
                    ]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(f"nvrx_slurm.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> NoReturn:
        """The one place where errors of commands become one sentence, with the code of their kind."""
        try:
            code = super().invoke(ctx)
        except NvrxError as error:
            click.echo(f"nvrx {ctx.invoked_subcommand}: {error}", err=True)
            code = error.exit_code
        except PermissionError as error:
            click.echo(
                f"nvrx {ctx.invoked_subcommand}: {error.filename}: {error.strerror}; ask its owner",
                err=True,
            )
            code = ExitCode.USAGE
        except (
            ModuleNotFoundError
        ) as error:  # a package that is not installed, as on a node without torch
            package = (error.name or "").partition(".")[0]
            if package in ("", "nvrx_slurm"):
                raise
            how = f": {error}" if "pip install" in str(error) else ""
            text = f"this command needs the Python module {package}, which is not installed{how}"
            raise click.UsageError(text) from None
        sys.exit(code)


@click.group(cls=_Toolbox, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nvrx")
def main() -> None:
    """Tools for jobs run by nvrx-run."""


if __name__ == "__main__":
    main()
