"""Public import path, as in NVRx, of `inprocess.plugins.abort`."""

from nvrx_slurm.inprocess.plugins.abort import *  # noqa: F403
