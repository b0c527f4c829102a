"""Public import path, as in NVRx, of `inprocess.plugins.completion`."""

from nvrx_slurm.inprocess.plugins.completion import *  # noqa: F403
