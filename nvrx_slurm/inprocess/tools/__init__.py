"""Public import path, as in NVRx, of `testing.inject_fault`."""

from nvrx_slurm.inprocess.tools import inject_fault as inject_fault
