"""The run that a command is about, and what the shell completes for it: the jobs of the log directory."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import click

from nvrx_slurm.views.log_tree import find_run, log_dir

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_WITHIN_S = 1.0
_MOST = 500
_JOB = re.compile(r"\w[\w.-]*", re.ASCII)  # a shell takes what is completed as if it was typed


def jobs(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """The job ids that begin with this text, the highest first; without any, paths."""
    from click.shell_completion import CompletionItem  # here: `nvrx status` is asked often

    from nvrx_slurm.system import bounded

    def there() -> list[str]:
        with os.scandir(log_dir()) as entries:
            return [
                entry.name for entry in entries if entry.name.startswith(begun) and entry.is_dir()
            ]

    try:
        names = sorted(
            bounded.call(there, _WITHIN_S, "completion"),
            key=lambda name: (len(name), name),
            reverse=True,
        )
    except (OSError, bounded.Overrun):
        names = []
    found = [CompletionItem(name) for name in names if _JOB.fullmatch(name)]
    return found[:_MOST] or [CompletionItem(begun, type="file")]


place = click.argument(
    "place",
    default="latest",
    callback=lambda ctx, param, place: find_run(place),
    shell_complete=jobs,
)
"""The argument of commands that are about one run."""
