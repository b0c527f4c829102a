"""Public import path, as in NVRx, of `inprocess.plugins.health_check`."""

from nvrx_slurm.inprocess.plugins.health_check import *  # noqa: F403
