"""What the workers of a node are, how they are watched, and their environment: torchrun's contract, plus ours.

The environment is made by pure functions: `--dry-run` prints the same.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.child import processes
from nvrx_slurm.core.checkpoint.interval import mtbf_s
from nvrx_slurm.core.rank.sections import is_wait
from nvrx_slurm.declared import Record
from nvrx_slurm.types import Node, Plan, RankFault

# Variables that differ from rank to rank, or from cycle to cycle.
RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *(
        "NVRX_TERM",
        "NVRX_CYCLE",
        "NVRX_INFRA_RANK",
        "NVRX_RUN_DIR",
        "NVRX_CURRENT_CYCLE_INFO",
        "NVRX_BOARD",
    ),
    *("NVRX_RESUME_BEFORE", "NVRX_RESUME_FROM", "NVRX_MTBF", "NVRX_KEEPER_BYTES"),
    "FT_RANK_MONITOR_IPC_SOCKET",
)
# What nvrx-run in front of a step tells its tasks. A job that a rank submits is another one.
_OF_STEP = (
    "NVRX_RUN",
    "NVRX_BEGAN",
    "NVRX_OUT",
    "NVRX_JOB_NAME",
    "NVRX_DEVICES",
    "NVRX_STDIN",
    "NVRX_KILL_WAIT",
)
LINE_PREFIX = "[rank {rank}] "
LOCAL_RANK_MACRO = "${local_rank}"  # in a script's arguments; torchrun replaces it, too


class WorkerContract(Record):
    """What does not change from cycle to cycle."""

    run_id: str
    role: str
    run_dir: str
    cycle_info: str = ""  # the link to the file of --ft-cycle-info-dir; "" = there is none
    first_local: int = 0  # LOCAL_RANK of the first worker, where several agents share a node
    local_world: int = 0  # LOCAL_WORLD_SIZE; 0 = the workers of this agent
    checkpoint_memory: int = 0  # bytes, of --ft-checkpoint-memory; 0 = it was not given
    checkpoint_interface: str = ""  # over which copies go; "" = there are none


class WarmSpec(Record):
    """What standbys of this job are like."""

    path0: str | None  # what Python puts in front of sys.path; None = nothing
    preload: Sequence[str] = ()  # modules that the user named; () = those that workers load
    imports: Sequence[str] = ()  # those that the script imports first of all
    later: Sequence[str] = ()  # those that the script imports, and that may turn out to be unfit
    next: Sequence[str] = ()  # those of them that the first workers wait for
    scout: str = ""  # what the script imports torch by


class WorkerSpec(Record):
    """What to start and how to watch it."""

    argv: Sequence[str]
    contract: WorkerContract
    limits: Mapping[str, Any]  # seconds, by the names of `core.rank.watch.RankLimits`
    termination_signal: int
    shown: Callable[
        [int], int
    ]  # local rank -> bits of streams copied to the console: 1 stdout, 2 stderr
    line_prefix: str = LINE_PREFIX  # of the lines on the console
    monitored: bool = True
    settings: Mapping[str, Any] | None = None  # for the rank's `client.cfg`
    prefixes: Sequence[Sequence[str]] = ()  # by local rank: what goes before `argv` (numactl)
    warning_signal: int = 0  # workers without a handler for this signal shall not die of it; 0 = none
    in_step: bool = False  # Slurm signals the workers itself
    hang_collect_s: float = 0.0  # how long a look at all ranks may take when one hangs
    straggler_window_s: float = 0.0  # 0 = slow ranks are not looked for
    is_wait: Callable[[str], bool] = is_wait
    warm: WarmSpec | None = None  # None: workers are always executed
    step_hook: bool = (
        False  # count the steps of torch's optimizers; `argv` is a command of this Python
    )
    step_timeout_factor: float = 10.0  # see core.rank.stalls
    step_timeout_s: float = 0.0
    script: str = ""  # its path, if it is one
    stdin: int = subprocess.DEVNULL
    wrapped: bool = False  # min-healthy: a dead worker's helpers speak for it to the other ranks until the cycle ends

    @property
    def sections(self) -> list[str]:
        """Names of the sections, in the order of a rank's page."""
        return list(self.limits.get("rank_section_timeouts") or ())

    @property
    def inspects_stalls(self) -> bool:
        """Whether ranks that tell nothing are inspected when they make no step for long."""
        return self.step_hook and self.step_timeout_s > 0.0 and self.hang_collect_s > 0.0


@dataclass
class StartedWorker:
    """One worker that was started. `hang`: what its monitor said."""

    child: processes.Child
    where: RankFault  # template of its fault
    released_s: float  # when it was (monotonic seconds)
    hang: RankFault | None = None

    def signal(self, signum: int, wake: bool) -> None:
        """Send a signal to its process group; `wake`: SIGCONT too, because a stopped one acts on nothing.

        SIGKILL is for itself alone: what else is in its group is killed when it is reaped, but helpers that clean up.
        """
        if self.hang is not None and signum == signal.SIGTERM:
            return  # its monitor ends it, after it has printed its stacks
        if signum == signal.SIGKILL:
            return self.child.kill()
        self.child.signal_group(signum)
        if wake:
            self.child.signal_group(signal.SIGCONT)


def rank_env(
    contract: WorkerContract, plan: Plan, node: Node, local_rank: int, error_file: str
) -> dict[str, str]:
    """The variables that tell one worker its place (torchrun's names and meanings). `local_rank`: in its agent."""
    rank = plan.rank_offset + local_rank
    extra, past = (
        {"NVRX_CURRENT_CYCLE_INFO": contract.cycle_info} if contract.cycle_info else {},
        plan.history,
    )
    known_s = past.restarts[-1].at_s + past.restarts[-1].down_s if past.restarts else 0.0
    if past.resume_before >= 0:
        extra["NVRX_RESUME_BEFORE"] = str(past.resume_before)
    if past.resume_from:
        extra["NVRX_RESUME_FROM"] = past.resume_from
    if contract.checkpoint_memory:
        extra["NVRX_KEEPER_BYTES"] = str(contract.checkpoint_memory)
    return extra | {
        "RANK": str(rank),
        "LOCAL_RANK": str(contract.first_local + local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(contract.local_world or node.nproc),
        "GROUP_RANK": str(plan.group_rank),
        "GROUP_WORLD_SIZE": str(plan.active_nodes),
        "ROLE_NAME": contract.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(plan.cycle),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": contract.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "NVRX_MTBF": f"{mtbf_s(max(1, plan.active_nodes), known_s, past.restarts_used):.0f}",
        "NVRX_TERM": str(plan.term),
        "NVRX_CYCLE": str(plan.cycle),
        "NVRX_INFRA_RANK": str(node.infra_rank),
        "NVRX_RUN_DIR": contract.run_dir,
    }


def worker_env(
    inherited: Mapping[str, str], rank_vars: Mapping[str, str], nproc: int
) -> dict[str, str]:
    """Environment of one worker: what is inherited, torchrun's defaults where unset, then `rank_vars`.

    A rank of another run may have started or submitted this one: what it alone was told is not inherited.
    """
    of_others = {*_OF_STEP, *RANK_NAMES}
    env = {name: value for name, value in inherited.items() if name not in of_others}
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.update(rank_vars)
    return env
