"""Public import path, as in NVRx, of what RankMonitorClient takes and gives."""

from nvrx_slurm.fault_tolerance import *  # noqa: F403
