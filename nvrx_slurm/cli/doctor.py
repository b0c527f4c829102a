"""`nvrx doctor`: can a job run on this node, and are Slurm's hooks set up right? One line per fact, with what to do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from nvrx_slurm.cli.doctor_site import FAIL, Line, Site, find_site
from nvrx_slurm.errors import ExitCode

JOB, HOOKS = "job", "hooks"  # the two parts
_TITLES = {
    JOB: "Can a job run on this node?",
    HOOKS: "Optional: hooks with which Slurm drains broken nodes",
}


class Part(NamedTuple):
    """The lines of one part. `failed`: whether they count for the exit code."""

    name: str
    lines: list[Line]

    @property
    def failed(self) -> bool:
        return any(line.status == FAIL for line in self.lines)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of lines.")
@click.option("--hooks", metavar="DIR", default="", help="Folder of the hooks (default: as slurm.conf says).")
@click.option("--scontrol", metavar="FILE", default="", help="scontrol (default: in PATH).")
def doctor(as_json: bool, hooks: str, scontrol: str) -> None:
    """Say whether a job can run on this node, and whether Slurm's hooks are set up right. Run it on a compute node; as
    root for the hooks.

    Exit code: 0 nothing failed (there may be warnings), 1 a check failed. Hooks that are not installed do not fail.
    """
    parts = examine(hooks, scontrol)
    if as_json:
        click.echo(json.dumps([{"part": part.name, **line._asdict()} for part in parts for line in part.lines]))
    else:
        click.echo("\n\n".join(_text(part) for part in parts))
    sys.exit(ExitCode.FAILED if any(part.failed for part in parts) else ExitCode.OK)


def _text(part: Part) -> str:
    width = max(len(line.name) for line in part.lines)
    rows = [_TITLES[part.name]]
    for line in part.lines:
        rows.append(f"{line.status:4}  {line.name:{width}}  {line.text}")
        if line.advice:
            rows.append(f"      {'':{width}}  -> {line.advice}")
    return "\n".join(rows)


def examine(hooks: str = "", scontrol: str = "") -> list[Part]:
    """Both parts; their lines are in the order in which problems are best mended."""
    from nvrx_slurm.cli import doctor_hooks, doctor_job

    site = find_site(hooks, scontrol)
    return [Part(JOB, _lines(doctor_job.LOOKS, site)), Part(HOOKS, _lines(doctor_hooks.looks(site), site))]


def _lines(looks: tuple[Callable[[Site], Iterator[Line]], ...], site: Site) -> list[Line]:
    return [line for look in looks for line in look(site)]
