"""The one way to Slurm: `connect(choice)` gives a `Slurm`, see `cli`.

Backends are pyslurm, where it is installed for this cluster's version, and Slurm's command line tools. Both give the
same answers and errors (`facts`). All calls block and are bounded. No call is made on the way of a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api.facts import NotInstalled

if TYPE_CHECKING:
    from nvrx_slurm.slurm.api.cli import Slurm


class NotUsable(NotInstalled, UsageError):
    """pyslurm was asked for and does not work. An agent goes on without Slurm's answers; a command ends with 2."""


def connect(choice: str = "auto") -> tuple[Slurm, str]:
    """A new backend by --slurm-api (auto, cli or pyslurm), and one sentence why it is this one. Raises NotUsable."""
    # Imported here: most processes never ask Slurm.
    from nvrx_slurm.slurm.api import by_pyslurm, cli

    if choice == "cli":
        return cli.Slurm(), "as --slurm-api says"
    found, why = by_pyslurm.load()
    if found is None and choice == "pyslurm":
        raise NotUsable(
            f"--slurm-api pyslurm: {why}; install it for this cluster's version, or use cli"
        )
    return found or cli.Slurm(), why
