"""The one way to Slurm: `connect()` gives a backend with the methods of `interface.Slurm`.

Backends are pyslurm, where it is installed for this cluster's version, and Slurm's command line tools. Both give the
same answers and errors (`facts`). All calls block and are bounded. No call is made on the way of a restart.
"""

from __future__ import annotations

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api.facts import NotInstalled
from nvrx_slurm.slurm.api.interface import Slurm

_process: dict[str, Slurm] = {}  # the backend of this process, by the choice it was made for
_choice = "auto"
_why = ""


class NotUsable(NotInstalled, UsageError):
    """pyslurm was asked for and does not work. An agent goes on without Slurm's answers; a command ends with 2."""


def choose(choice: str) -> None:
    """What --slurm-api says: auto, cli or pyslurm. The next `connect` makes a new backend."""
    global _choice
    _choice = choice
    for made in _process.values():
        made.close()
    _process.clear()


def connect() -> Slurm:
    """The backend of this process. Raises NotUsable where pyslurm was asked for and does not work."""
    if _choice not in _process:
        _process[_choice] = _made(_choice)
    return _process[_choice]


def why() -> str:
    """Why the backend of this process is the one it is: one sentence."""
    return _why


def _made(choice: str) -> Slurm:
    global _why
    # Imported here: most processes never ask Slurm.
    from nvrx_slurm.slurm.api.cli import CommandLine

    _why = "as --slurm-api says"
    if choice != "cli":
        from nvrx_slurm.slurm.api import by_pyslurm

        found, problem = by_pyslurm.load()
        _why = problem or "pyslurm is of this cluster's version"
        if found is not None:
            return found
        if choice == "pyslurm":
            raise NotUsable(f"--slurm-api pyslurm: {problem}; install it for this cluster's version, or use cli")
    return CommandLine()
