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


def why_not_pyslurm() -> str:
    """Why `connect` gives the command line tools; "" if it gives pyslurm. Asks pyslurm where it is installed."""
    if _choice == "cli":
        return "--slurm-api cli"
    from nvrx_slurm.slurm.api import by_pyslurm

    found, why = by_pyslurm.load()
    if found is not None:
        found.close()
    return why


def _made(choice: str) -> Slurm:
    # Imported here: most processes never ask Slurm.
    from nvrx_slurm.slurm.api.cli import CommandLine

    if choice != "cli":
        from nvrx_slurm.slurm.api import by_pyslurm

        found, why = by_pyslurm.load()
        if found is not None:
            return found
        if choice == "pyslurm":
            raise NotUsable(f"--slurm-api pyslurm: {why}; install it for this cluster's version, or use cli")
    return CommandLine()
