"""`nvrx`: the toolbox beside `nvrx-run`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

try:
    import click
except ModuleNotFoundError:  # pip install --no-deps
    sys.exit("nvrx needs four packages: pip install click msgspec pyyaml nvidia-ml-py")

from nvrx_slurm import __version__
from nvrx_slurm.errors import ExitCode, NvrxError

# Where each command is. `nvrx status` is asked often, and all of them together take half a second to import.
_COMMANDS = {
    "doctor": "cli.doctor:doctor",
    "goodput": "views.goodput:goodput",
    "health": "cli.health:health",
    "list": "views.runs:list_runs",
    "logs": "cli.logs:logs",
    "metrics": "views.metrics:metrics",
    "replay": "views.replay:replay",
    "report": "views.report:report",
    "stacks": "cli.stacks:stacks",
    "status": "views.status:status",
    "submit": "cli.submit:submit",
    "why": "views.why:why",
}
_GROUPS = {
    "Run": "submit doctor",
    "Watch": "list status logs stacks",
    "Explain": "why report goodput replay",
    "Administer": "health metrics",
}
_ALL = 1000  # characters: more than the first sentence of any command


class _Toolbox(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._line(ctx, name)) for name in names.split()])

    def _line(self, ctx: click.Context, name: str) -> str:
        try:
            command = self.get_command(ctx, name)
        except ModuleNotFoundError as error:
            return f"(needs the Python module {error.name}, which is not installed)"
        return command.get_short_help_str(_ALL) if command else ""

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
