"""What the shell completes beside flags: jobs of the log directory, and names of health checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.log_tree import log_dir

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_MOST = 500


def jobs(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Job ids that begin like this, the highest first; else paths."""
    from click.shell_completion import CompletionItem  # here: `nvrx status` is asked often

    names = [path.name for path in log_dir().glob("[!.]*") if path.name.startswith(begun) and path.is_dir()]
    found = [CompletionItem(name) for name in sorted(names, key=lambda name: (len(name), name), reverse=True)]
    return found[:_MOST] or [CompletionItem(begun, type="file")]


def checks(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Health checks whose names begin like this, with what each reads."""
    from click.shell_completion import CompletionItem

    from nvrx_slurm.health.registry import built_in

    return [CompletionItem(name, help=check.reads) for name, check in built_in().items() if name.startswith(begun)]
