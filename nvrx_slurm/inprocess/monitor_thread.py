"""Public import path, as in NVRx, of `inprocess.guard.monitor_thread`."""

from nvrx_slurm.inprocess.guard.monitor_thread import *  # noqa: F403
