"""Public import path, as in NVRx, of `inprocess.plugins.rank_assignment`."""

from nvrx_slurm.inprocess.plugins.rank_assignment import *  # noqa: F403
