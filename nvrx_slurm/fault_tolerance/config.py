"""Public import path, as in NVRx, of FaultToleranceConfig."""

from nvrx_slurm.fault_tolerance import *  # noqa: F403
