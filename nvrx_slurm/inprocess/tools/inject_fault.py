"""Public import path, as in NVRx, of `testing.inject_fault`."""

from nvrx_slurm.testing.inject_fault import *  # noqa: F403
