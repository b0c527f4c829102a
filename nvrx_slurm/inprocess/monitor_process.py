"""Public import path, as in NVRx, of `inprocess.watch.monitor_process`."""

from nvrx_slurm.inprocess.watch.monitor_process import *  # noqa: F403
