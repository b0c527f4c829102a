"""Shell completion: the candidates for each place on the command line, and the script that makes a shell ask for them.

The shell runs the program itself with `_NVRX_RUN_COMPLETE` and the words so far in the environment (click's protocol).
"""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem, get_completion_class

from nvrx_slurm.config import Setting

SHELLS = ("bash", "zsh", "fish")
# (program, variable in which the shell asks it); an alias is asked like its program
_PROGRAMS = (("nvrx-run", "_NVRX_RUN_COMPLETE"), ("ft_launcher", "_NVRX_RUN_COMPLETE"), ("nvrx", "_NVRX_COMPLETE"))

Candidates = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(ctx: click.Context, param: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """The files that the shell finds."""
    return [CompletionItem(incomplete, type="file")]


def values(item: Setting) -> Candidates:
    """The words that a setting's value may be (`true|false`), files where it is a path, otherwise nothing."""
    if item.kind.metavar.startswith("PATH"):
        return files
    words = [word for word in item.kind.metavar.split("|") if word == word.lower()]

    def matching(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    return matching


def script(shell: str) -> str:
    """The text that `shell` (one of SHELLS) reads once, at its start, for all programs of this package."""
    ask = get_completion_class(shell)
    assert ask is not None
    parts = []
    for program, variable in _PROGRAMS:
        one = ask(click.Command(program), {}, program, variable)
        parts.append(one.source_template % one.source_vars())  # source() would look for a bash on this machine first
    return "\n".join(parts)
