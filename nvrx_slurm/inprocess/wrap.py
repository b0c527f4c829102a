"""Public import path, as in NVRx, of Wrapper and CallWrapper."""

from nvrx_slurm.inprocess.call import CallWrapper as CallWrapper
from nvrx_slurm.inprocess.wrapper import Wrapper as Wrapper
