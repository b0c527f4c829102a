"""Public import path, as in NVRx, of `inprocess.plugins.compose`."""

from nvrx_slurm.inprocess.plugins.compose import *  # noqa: F403
