"""Public import path, as in NVRx, of `inprocess.plugins.rank_assignment` and `rank_tree`."""

from nvrx_slurm.inprocess.plugins.rank_assignment import *  # noqa: F403
from nvrx_slurm.inprocess.plugins.rank_tree import Layer as Layer
from nvrx_slurm.inprocess.plugins.rank_tree import LayerFlag as LayerFlag
from nvrx_slurm.inprocess.plugins.rank_tree import Tree as Tree
