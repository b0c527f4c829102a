"""`connect` gives the one interface to Slurm (see interface.Slurm). Being built in branch s14-api."""

from __future__ import annotations

from nvrx_slurm.slurm.api.interface import Slurm


def connect(choice: str = "auto") -> Slurm:
    from nvrx_slurm.slurm.api.cli import CommandLine

    return CommandLine()
