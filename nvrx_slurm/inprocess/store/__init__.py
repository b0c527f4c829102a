"""Public import path, as in NVRx, of the stores; the other modules are what the ranks of one call say in a store."""

from nvrx_slurm.inprocess.store.stores import *  # noqa: F403
