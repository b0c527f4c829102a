"""What the agent is told (settings, events) and what it asks for (commands). `Tick` and `Say` are in `core.machine`.

`Prepare` and `Prepared` are the preflight before every cycle. The program begins with one: no `Prepare` asks for it.

Its other events are the coordinator's messages: Plan, Stop, CheckNode, Collect, Finish, Refused, Warn, RanksGone, Lead.
"""

from __future__ import annotations

from nvrx_slurm.declared import Record
from nvrx_slurm.types import (
    AgentMessage,
    Examine,
    Plan,
    RankEvidence,
    RankFault,
    RestartPolicy,
    Spent,
    WorkloadAction,
)


class AgentSettings(Record, kw_only=True):
    """What the agent is told once. All times in seconds."""

    stop_timeout_s: float  # SIGTERM -> SIGKILL when workers are stopped for a restart or at the end
    idle_s: float  # the same where no worker does anything meanwhile; 0 = the full time
    term_timeout_s: float  # the same when a signal ends the job; below Slurm's KillWait
    kill_timeout_s: float  # SIGKILL -> giving up on a worker that does not end (D state)
    same_signal_s: float = 3.0  # signals this close together are one wish to end
    # Slurm signals the workers itself, at about the time the coordinator tells us
    in_step: bool = False
    orphan_grace_s: float = 2.0  # how long workers go on without a coordinator
    join_timeout_s: float  # how long to look for a coordinator at the start
    reconnect_timeout_s: float = 30.0  # the same after having lost one
    # how long an agent that knows the end waits until all others know it, too
    end_timeout_s: float = 10.0
    elects: bool = False  # the coordinator is elected: one that is only a candidate is none yet
    policy: RestartPolicy
    hang_collect_s: float  # how long all ranks may be looked at when one hangs; 0 = they are not
    warning_signum: int  # the user signal that means: the job is about to end; 0 = none does


# --- events -----------------------------------------------------------------------------------------


class Connected(Record):
    """A stream to a coordinator is open and both sides have proved who they are."""


class Disconnected(Record):
    """The stream broke, or went silent."""

    why: str


class Unreached(Record):
    """No stream could be opened. The elections handle it, not the agent's core: they try the next address."""

    why: str


class LeaseOver(Record):
    """No coordinator has renewed this node's lease: another node may start its ranks soon."""


class WorkerExited(Record):
    """A worker is gone; `fault` is None when it ended with 0."""

    local_rank: int
    fault: RankFault | None
    early: bool = False  # it ended with 0 because `should_stop` had told it to
    spent: Spent | None = None  # with the last one of a cycle


class Idle(Record):
    """All workers that are alive have waited in C for `idle_s` seconds, and so no handler of SIGTERM has begun."""


class RankAsked(Record):
    """A rank made a workload control request."""

    local_rank: int
    action: WorkloadAction
    description: str


class HangSeen(Record):
    """A rank monitor found its rank hung and is killing it. `doubted`: it makes no steps, and nobody kills it."""

    fault: RankFault
    doubted: bool = False


class Inspected(Record):
    """The answer to `InspectRanks`, which always comes."""

    cycle: int
    ranks: tuple[RankEvidence, ...]


class Signalled(Record):
    """This agent got a signal that ends the job (TERM, INT, HUP, QUIT)."""

    signum: int
    # Slurm sends it to every process of the step, so the workers have had it, too
    everybody: bool = False


class Warned(Record):
    """This agent got a user signal (USR1, USR2): the warning, or one that is only passed on to the workers."""

    signum: int
    everybody: bool = False  # as in Signalled


class Prepared(Record):
    """The answer to `Prepare`, which always comes. `unfit`: why the node must not be used; "" if it may."""

    unfit: str = ""


class Sick(Record):
    """A check of the node failed at another time."""

    why: str


# --- commands -------------------------------------------------------------------------------------------


class Send(Record):
    """Send to the coordinator. The shell fills in `port` where a message has one."""

    message: AgentMessage


class StartWorkers(Record):
    """Start all workers of this node for `plan`."""

    plan: Plan


class SignalWorkers(Record):
    """`signum` and then SIGCONT to the process groups of all workers that are alive. `idle_s` > 0: post `Idle`."""

    signum: int
    idle_s: float = 0.0


class PassOn(Record):
    """Only `signum` to the process groups of all workers that are alive."""

    signum: int


class InspectRanks(Record):
    """Find out what all living ranks of this node do, within `within_s` seconds, and post `Inspected`."""

    cycle: int
    within_s: float


class WarnRanks(Record):
    """Make `should_stop` true in all ranks of this node that are alive; without a signal."""


class PostGone(Record):
    """Tell the in-process wrappers on this node that these ranks of the cycle are dead."""

    cycle: int
    ranks: tuple[int, ...]
    reason: str


class Prepare(Record):
    """Make the node ready for the workers of `cycle` and check it. `used`: workers have run on it."""

    used: bool
    cycle: int


class EndHeld(Record):
    """End the processes that were started ahead for the next workers: this node runs none soon."""


class Exit(Record):
    """The agent's program ends with `code`."""

    code: int
    reason: str


COMMANDS = (
    Send,
    StartWorkers,
    SignalWorkers,
    PassOn,
    InspectRanks,
    WarnRanks,
    PostGone,
    Prepare,
    EndHeld,
    Examine,
)
