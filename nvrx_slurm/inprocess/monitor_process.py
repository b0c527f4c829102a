"""Public import path, as in NVRx, of `inprocess.guard.monitor_process`."""

from nvrx_slurm.inprocess.guard.monitor_process import *  # noqa: F403
