"""`nvrx`: the toolbox beside `nvrx-run`."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import NoReturn

try:
    import click
except ModuleNotFoundError:  # pip install --no-deps
    sys.exit("nvrx needs three packages: pip install click pyyaml nvidia-ml-py")

from nvrx_slurm import __version__
from nvrx_slurm.cli import complete
from nvrx_slurm.cli.log_tree import find_run
from nvrx_slurm.errors import ExitCode, NvrxError
from nvrx_slurm.system.foreign import names_in, opened

# Where each command is. `nvrx status` is asked often, and all of them together take half a second to import.
_COMMANDS = {
    "doctor": "doctor:doctor",
    "goodput": "goodput:goodput",
    "health": "health:health",
    "list": "status:list_runs",
    "logs": "logs:logs",
    "metrics": "metrics:metrics",
    "report": "report:report",
    "stacks": "stacks:stacks",
    "status": "status:status",
    "submit": "submit:submit",
    "why": "why:why",
}


class _Toolbox(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module, _, name = _COMMANDS.get(cmd_name, "").partition(":")
        if not name:
            return super().get_command(ctx, cmd_name)
        command = getattr(import_module(f"nvrx_slurm.cli.{module}"), name)
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
            click.echo(f"nvrx {ctx.invoked_subcommand}: {error.filename}: {error.strerror}; ask its owner", err=True)
            code = ExitCode.USAGE
        except ModuleNotFoundError as error:  # a package that is not installed, as on a node without torch
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


@main.command()
@click.argument("place", default="latest", callback=find_run, shell_complete=complete.jobs)
def replay(place: Path) -> None:
    """Decide anew on the events of event logs, and compare with the decisions in the logs.

    PLACE is one log (<run>/events/*.jsonl), a job id, or the directory of a job or run: then each coordinator's log is
    replayed in the order of their terms, then each agent's. Exit code 0: the same decisions throughout (a torn last
    line, as a killed program leaves it, is reported only); 1: they differ, with the line and the difference.
    """
    logs = [place / "events" / name for name in names_in(place / "events") if name.endswith(".jsonl")]
    files = sorted(logs, key=_in_order) if place.is_dir() else [place]
    if not files:
        raise click.UsageError(
            f"{place} has no events/*.jsonl; give the directory of a run, for example nvrx_logs/latest"
        )
    if not all([_replay(file) for file in files]):
        sys.exit(ExitCode.FAILED)


def _in_order(file: Path) -> tuple[bool, list[int], str]:
    """Coordinators by their terms, then agents by their infra ranks."""
    return file.stem.startswith("agent"), [int(part) for part in file.stem.split("_") if part.isdecimal()], file.stem


def _replay(file: Path) -> bool:
    from nvrx_slurm.core.event_log import MAX_LINE_CHARS
    from nvrx_slurm.core.event_log import replay as run_again

    try:
        with TextIOWrapper(BufferedReader(opened(file.parent, file.name)), "utf-8", "replace") as text:
            found = run_again(iter(partial(text.readline, MAX_LINE_CHARS + 2), ""))
    except OSError as error:
        click.echo(f"{file}: {error.strerror}", err=True)
        return False
    for difference in found:
        click.echo(f"{file}: {difference}", err=True)
    same = all(difference.torn for difference in found)
    if same:
        click.echo(f"{file}: the same decisions throughout")
    return same


if __name__ == "__main__":
    main()
