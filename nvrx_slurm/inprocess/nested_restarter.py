"""Public import path, as in NVRx, of `inprocess.plugins.nested_restarter`."""

from nvrx_slurm.inprocess.plugins.nested_restarter import *  # noqa: F403
