"""Public import path, as in NVRx, of `inprocess.plugins.finalize`."""

from nvrx_slurm.inprocess.plugins.finalize import *  # noqa: F403
