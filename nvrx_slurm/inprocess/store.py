"""Public import path, as in NVRx, of `inprocess.meeting.store`."""

from nvrx_slurm.inprocess.meeting.store import *  # noqa: F403
