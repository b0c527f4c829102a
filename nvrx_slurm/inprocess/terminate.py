"""Public import path, as in NVRx, of these parts of `inprocess.plugins.steps`."""

from nvrx_slurm.inprocess.plugins.steps import Terminate as Terminate
