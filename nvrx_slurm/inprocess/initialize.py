"""Public import path, as in NVRx, of `inprocess.plugins.initialize`."""

from nvrx_slurm.inprocess.plugins.initialize import *  # noqa: F403
