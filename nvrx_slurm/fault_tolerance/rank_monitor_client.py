"""Public import path, as in NVRx, of RankMonitorClient."""

from nvrx_slurm.fault_tolerance import *  # noqa: F403
