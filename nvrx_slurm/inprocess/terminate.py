"""Public import path, as in NVRx, of `inprocess.plugins.terminate`."""

from nvrx_slurm.inprocess.plugins.terminate import *  # noqa: F403
