"""`nvrx`: the toolbox beside `nvrx-run`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nvrx_slurm import __version__
from nvrx_slurm.cli.doctor import doctor
from nvrx_slurm.cli.health import health
from nvrx_slurm.errors import ExitCode


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="nvrx")
def main() -> None:
    """Tools for jobs run by nvrx-run."""


main.add_command(doctor)
main.add_command(health)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(file: Path) -> None:
    """Feed the events of an event log FILE (<run>/events/*.jsonl) to a fresh core and compare its decisions.

    Exit code 0: the same decisions throughout (a torn last line, as a killed program leaves it, is reported only);
    1: they differ, with the line and the difference.
    """
    from nvrx_slurm.core.record import replay as run_again

    with file.open(encoding="utf-8", errors="replace") as lines:
        found = run_again(lines)
    for difference in found:
        click.echo(f"{file}: {difference}", err=True)
    if any(not difference.torn for difference in found):
        sys.exit(ExitCode.FAILED)
    click.echo(f"{file}: the same decisions throughout")


if __name__ == "__main__":
    main()
