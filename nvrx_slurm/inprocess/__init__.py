"""In-process restart: a wrapped training function is called again, in the same processes, after a fault."""

from nvrx_slurm.inprocess import abort as abort
from nvrx_slurm.inprocess import attribution as attribution
from nvrx_slurm.inprocess import completion as completion
from nvrx_slurm.inprocess import exception as exception
from nvrx_slurm.inprocess import finalize as finalize
from nvrx_slurm.inprocess import health_check as health_check
from nvrx_slurm.inprocess import initialize as initialize
from nvrx_slurm.inprocess import monitor_process as monitor_process
from nvrx_slurm.inprocess import monitor_thread as monitor_thread
from nvrx_slurm.inprocess import nested_restarter as nested_restarter
from nvrx_slurm.inprocess import rank_assignment as rank_assignment
from nvrx_slurm.inprocess import state as state
from nvrx_slurm.inprocess import store as store
from nvrx_slurm.inprocess import terminate as terminate
from nvrx_slurm.inprocess.call import CallWrapper as CallWrapper
from nvrx_slurm.inprocess.plugins.compose import Compose as Compose
from nvrx_slurm.inprocess.state import FrozenState as FrozenState
from nvrx_slurm.inprocess.state import Mode as Mode
from nvrx_slurm.inprocess.state import State as State
from nvrx_slurm.inprocess.wrapper import Wrapper as Wrapper
