"""The coordinator's states, what it is told once, and where the job is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.declared import Record
from nvrx_slurm.types import InMemory, Node, Peer, RestartPolicy, Warmth

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.assignment import Assignment
    from nvrx_slurm.core.coordinator.inherited import Inherited

SIGUSR1 = 10


class Stage(Enum):
    """States of the coordinator."""

    ELECTING = "this node stands for coordinator; waiting for a majority of the nodes"
    JOINING = "waiting for enough nodes"
    LAST_CALL = "enough nodes are here; waiting a moment for the others"
    TAKEOVER = "nodes run a cycle of an older term; waiting a moment for the rest of them"
    PAUSED = "ranks die at their start again and again; waiting before the next cycle"
    RUNNING = "a cycle is running"
    LAST_RANKS = "enough nodes are done; waiting for the last ranks of nodes with a fault"
    STOPPING = "waiting until the workers of a failed cycle are gone"
    SCORING = "the workers are gone; waiting for the progress that their cycle made"
    FINISHED = "the end is decided; waiting for the agents to leave"
    RETURNING = "all agents have left; waiting a moment for one that was cut off"
    CLOSED = "done"


RUNS = (Stage.RUNNING, Stage.LAST_RANKS)  # a cycle runs
FAILED = (Stage.STOPPING, Stage.SCORING)  # a cycle has failed
CYCLE = (*RUNS, *FAILED)  # of which workers may be left
OVER = (Stage.FINISHED, Stage.RETURNING, Stage.CLOSED)
LIVE = tuple(stage for stage in Stage if stage not in (Stage.ELECTING, *OVER))


def live_but(*others: Stage) -> tuple[Stage, ...]:
    """All states between the election and the end, without some."""
    return tuple(stage for stage in LIVE if stage not in others)


class CoordinatorSettings(Record, kw_only=True):
    """What the coordinator is told once. All times in seconds."""

    term: int = 1
    # any-failed: active nodes of every cycle; min-healthy: fewest good ones; >= 1
    min_nodes: int = 1
    max_nodes: int = 1  # how many are expected at the start; waiting for more makes no sense
    max_restarts: int  # per job
    policy: RestartPolicy
    limits: RestartLimits
    max_active: (
        int  # min-healthy: most active nodes of a cycle, the others are spares; 0 = all are active
    )
    segment: (
        int | None
    )  # group ranks go in segments of so many nodes of one domain; None: domains do not matter
    hang_collect_s: (
        float  # how long nodes may take to look at their ranks when one hangs; 0 = they do not
    )
    look_again_s: float  # between two looks at ranks that make no steps
    hang_exclude: bool  # the node of the rank that the others wait for leaves the job
    straggler_window_s: float  # in which slow ranks are looked for; 0 = never
    straggler_exclude: bool  # a slow node leaves the job
    tells_of_cycles: bool  # to an attribution service, or for --ft-cycle-info-dir
    stops_on_advice: bool  # its STOP ends the job
    tracks_progress: bool  # there is a checkpoint iteration file to read
    finds_checkpoints: (
        bool  # there is a directory of checkpoints: the first plan waits for what it holds
    )
    join_timeout_s: float  # how long to wait for min_nodes
    last_call_s: float  # first cycle: how long to wait for the rest once min_nodes are here
    # after how long to say which nodes are missing, where some are still being checked
    announce_s: float = 3.0
    stop_timeout_s: (
        float  # agents that still run workers this long after a stop are taken out of the job
    )
    drain_timeout_s: float  # how long the end waits for agents to leave
    # how long the end waits for a node whose stream has just broken to hear of it
    return_grace_s: float = 3.0
    time_limited: bool = False  # the allocation ends, and Slurm knows when
    warn_before_end_s: float  # how long before that ranks are warned; 0 = left to Slurm (--signal)
    stop_before_end_s: (
        float  # how long before that the job is stopped; 0 = left to Slurm (time limit)
    )
    warning_signum: int
    expected: tuple[str, ...] = ()  # host names by infra rank, to name the missing ones
    # where this coordinator listens; None where the job elects no coordinator
    peer: Peer | None = None
    electors: int = 0  # nodes of the job, of which most must be members; 0 = no quorum is needed
    one_life: bool = False  # no second agent begins on a node, as in a step of Slurm
    known: tuple[Peer, ...] = ()  # where other nodes may listen, before the first plan
    last_leader: str = ""  # key of the coordinator before this one
    # how long this node stands without a quorum; its voters end with 94; 0 = for ever
    quorum_timeout_s: float = 0.0
    began_s: float = 0.0  # when this coordinator began (Unix seconds)
    lease_s: float = 10.0  # how long ranks may run on a node whose stream broke
    prove_s: float = 2.0  # without a quorum: how long to wait for a proof of death before resigning


@dataclass
class JobState:
    """Where the job is. Times are monotonic seconds."""

    term: int
    started_at: float  # when its cycle began
    assignment: Assignment  # of the last plan
    inherited: Inherited  # what agents tell of earlier terms
    cycle: int = -1  # the last one that was planned, in any term; -1 = none
    fresh: bool = True  # nothing has been planned, carried on or given up in this term
    pause_until: float = 0.0  # no cycle starts before
    elsewhere: bool = False  # the next cycle runs on other nodes
    # node_id that a spare should replace then; "" = group ranks move on by a node
    suspect: str = ""
    unwanted: tuple[Node, str] | None = None  # leaves the job before the next plan, and why
    before: Assignment | None = None  # of the cycle before, where this coordinator planned it
    warmth: dict[str, Warmth] = field(default_factory=dict)  # what each node told last, by node_id
    # checkpoints in its memory, as each node told last, by node_id
    held: dict[str, InMemory | None] = field(default_factory=dict)
