"""What the shell completes beside flags: jobs of the log directory, and names of health checks.

A shell waits for the answer, so a file system that hangs has no jobs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.log_tree import log_dir

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_WITHIN_S = 1.0
_MOST = 500


def jobs(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Job ids that begin like this, the highest first; else paths."""
    from click.shell_completion import CompletionItem  # here: `nvrx status` is asked often

    from nvrx_slurm.system import bounded

    def there() -> list[str]:
        with os.scandir(log_dir()) as entries:
            return [entry.name for entry in entries if entry.name.startswith(begun) and entry.is_dir()]

    try:
        names = sorted(bounded.call(there, _WITHIN_S, "completion"), key=lambda name: (len(name), name), reverse=True)
    except (OSError, bounded.Overrun):
        names = []
    found = [CompletionItem(name) for name in names if not name.startswith(".")]
    return found[:_MOST] or [CompletionItem(begun, type="file")]


def checks(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Health checks whose names begin like this, with what each reads."""
    from click.shell_completion import CompletionItem

    from nvrx_slurm.health.registry import built_in

    return [CompletionItem(name, help=check.reads) for name, check in built_in().items() if name.startswith(begun)]
