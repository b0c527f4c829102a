"""The records that programs exchange and cores decide on: plain, frozen, comparable, without behaviour.

Units are in the names; times are monotonic seconds of one host and never leave it.
"""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.declared import (
    AtMost8,
    AtMost16,
    AtMost32,
    AtMost64,
    AtMost4096,
    Big,
    Cause,
    Count,
    Credential,
    Ended,
    ExitStatus,
    Name,
    OneTo64,
    Path,
    Place,
    Port,
    Reason,
    Record,
    Seconds,
    Sentence,
    Signum,
    Traceback,
    Workers,
)
from nvrx_slurm.records import Account as Account
from nvrx_slurm.records import Alike as Alike
from nvrx_slurm.records import Blame as Blame
from nvrx_slurm.records import Collective as Collective
from nvrx_slurm.records import Confidence as Confidence
from nvrx_slurm.records import Counted as Counted
from nvrx_slurm.records import CycleCost as CycleCost
from nvrx_slurm.records import Examine as Examine
from nvrx_slurm.records import Examined as Examined
from nvrx_slurm.records import Finding as Finding
from nvrx_slurm.records import Imported as Imported
from nvrx_slurm.records import Imports as Imports
from nvrx_slurm.records import InMemory as InMemory
from nvrx_slurm.records import Kept as Kept
from nvrx_slurm.records import Loaded as Loaded
from nvrx_slurm.records import LineRole as LineRole
from nvrx_slurm.records import LogServer as LogServer
from nvrx_slurm.records import MemoryPlan as MemoryPlan
from nvrx_slurm.records import NodeTime as NodeTime
from nvrx_slurm.records import Pace as Pace
from nvrx_slurm.records import Peer as Peer
from nvrx_slurm.records import RankEvidence as RankEvidence
from nvrx_slurm.records import RankPace as RankPace
from nvrx_slurm.records import Remedy as Remedy
from nvrx_slurm.records import SectionTime as SectionTime
from nvrx_slurm.records import Spent as Spent
from nvrx_slurm.records import StragglerRecord as StragglerRecord
from nvrx_slurm.records import Wanted as Wanted
from nvrx_slurm.records import Warmth as Warmth
from nvrx_slurm.records import Window as Window


class FaultKind(str, Enum):
    """What happened to a rank or node, from the point of view of the program that noticed it."""

    EXIT = "exit"  # the worker ended by itself with a non-zero code
    SIGNAL = "signal"  # the worker was ended by a signal that was not ours
    HANG = "hang"  # its rank monitor killed it: no sign of life within a timeout
    LOSS = "loss"  # it reported a loss that is wrong, and was killed for it
    SPAWN = "spawn"  # it could not be started at all
    UNKILLABLE = "unkillable"  # it did not end after SIGKILL (D state)
    NODE_LOST = "node-lost"  # its agent's stream broke or went silent
    EXCLUDED = "excluded"  # a rank asked to have its node taken out of the job
    UNHEALTHY = "unhealthy"  # a health check of its node failed
    INEXACT = "inexact"  # it was forked, and an executed one would have done something else


# Exit codes of all ranks of Megatron-LM (core/rerun_state_machine.py): a step is to be repeated on other GPUs; a result
# was rejected. One rank has printed why.
RERUN, REJECTED = 16, 17
VERDICT_S = 5.0  # how long the other ranks may then end by themselves, so that their output counts


class RestartPolicy(str, Enum):
    """When a fault restarts all workers."""

    ANY_FAILED = "any-failed"  # any fault does
    MIN_HEALTHY = "min-healthy"  # when fewer than MIN nodes run without a fault or are done


class WorkloadAction(Enum):
    """What a rank can ask of the job (`RankMonitorClient.send_workload_control_request`)."""

    Continue = 0  # noted, nothing else
    ExcludeThisNode = 1  # this node leaves at once and is not taken again in this job
    ShutdownWorkload = 2  # all ranks stop now, and the job should not be started again


class Activity(str, Enum):
    """What an agent that registers is doing with its last plan."""

    IDLE = "idle"  # it runs nothing
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # all its workers ended with 0
    STOPPING = "stopping"  # they are being stopped, or what they left behind is looked at: Ready follows
    ENDED = "ended"  # it knows the end of the job and has no workers: it waits until all agents know it
    PREPARING = "preparing"  # it has run nothing and is being checked: Ready follows


class Node(Record):
    """One life of one agent. A node that comes back is a new `Node` with the same `infra_rank`."""

    node_id: Name  # unique per agent life
    infra_rank: Count  # the order Slurm gave us; -1 = none was given
    host: Name  # for people, logs and the first cause
    addr: Name  # where the other nodes reach it (MASTER_ADDR); "" = as the coordinator sees it
    nproc: Workers  # workers it runs, >= 1
    order: AtMost8[Place] = ()  # position in the network topology, sorted before infra_rank
    port: Port = 0  # where its agent listens for the other agents; 0 = it does not
    domain: Name = ""  # its NVLink domain, block or replacement group, where the job has segments


class RankFault(Record):
    """Why one rank (or, with `rank` -1, one node) failed."""

    kind: FaultKind
    host: Name
    infra_rank: Count
    rank: Count = -1  # global rank in the plan of that cycle
    local_rank: Count = -1
    pid: Count = 0
    exit_code: Ended = 0  # as subprocess reports it: negative = ended by that signal
    message: Sentence = ""  # one sentence
    traceback: Traceback = ""  # from torchelastic's error file, or the tail of its stderr
    log: Path = ""  # path of the stderr file on that node
    finding: Finding | None = None  # what its output says

    @property
    def rejects(self) -> bool:
        """Whether it is Megatron-LM's way to say that a result is rejected: the other ranks end in the same way."""
        return self.kind is FaultKind.EXIT and self.exit_code in (RERUN, REJECTED)

    silent_s: Seconds = -1.0  # from its last sign of life until its agent reported this; -1 = not known


class KindCount(Record):
    """Restarts per kind of first cause: spent, or allowed."""

    kind: FaultKind
    count: Count


class RestartRecord(Record):
    """One restart of the workers."""

    cycle: Count  # the cycle that failed
    at_s: Seconds  # when its first fault became known, in seconds since the job began
    down_s: Seconds  # from then until the coordinator sent the next plan, or until the end of the job
    cause: Cause  # the sentence of its first cause
    rank: Count = -1  # of its first cause
    fingerprint: Name = ""  # of its first cause, where the rules know one
    host: Name = ""  # of its first cause
    infra_rank: Count = -1  # of its first cause
    exit_code: Ended = 0  # of its first cause
    iteration: Big = -1  # what the training had reached, as its output says; -1 = not known
    checkpoint: Big = -1  # iteration of the last checkpoint at that time; -1 = not known
    elsewhere: bool = False  # the next cycle ran on other nodes, to learn whether the failure stays with the node
    detect_s: Seconds = 0.0  # from the last sign of life of the first cause to `at_s`
    recomputed_s: Seconds = 0.0  # time of work since the last checkpoint, as far as that is known
    again_s: Seconds = 0.0  # from the next plan until the next cycle trains at its pace
    ran_s: Seconds = 0.0  # how long that cycle ran
    alone: bool = False  # as far as that cycle told, it may have been the node's own failure
    alike: AtMost8[Alike] = ()  # or that of these nodes as well
    memory: Big = -1  # iteration that all ranks of the next cycle have, or could have, loaded from memory; -1 = none
    replaced: AtMost16[Name] = ()  # hosts that have lost their places for it; () with `elsewhere`: that of the cause
    source: Name = ""  # of what they have loaded: memory, peer or disk; "" = they have not told
    resumed: Cause = ""  # the same in words
    steps: Big = -1  # done again, counted from what was in memory; -1 = not known


class History(Record):
    """What the job has behind it. Every plan carries it, so that any agent can tell it to the next coordinator."""

    restarts_used: Count = 0
    spent: AtMost16[KindCount] = ()  # the same by kind of the first cause
    no_progress: Count = 0  # cycles in a row without checkpoint progress
    iteration: Big = -1  # of the last checkpoint that was seen; -1 = none yet
    excluded: AtMost4096[Name] = ()  # nodes that are not taken again, as "INFRA_RANK@HOST"
    began_s: Seconds = 0.0  # when the job began (Unix seconds); 0 = not known
    down_s: Seconds = 0.0  # the time of all restarts
    restarts: AtMost8[RestartRecord] = ()  # the last 8
    lost: AtMost64[Name] = ()  # hosts of lost nodes, the first 64
    promoted: AtMost64[Name] = ()  # hosts of spares that were used, the first 64
    resume_before: Big = -1  # ranks are told to take a checkpoint older than this iteration; -1 = any
    resume_from: Path = ""  # path of the newest complete checkpoint of those; "" = none is known


class FaultRecord(Record):
    """One fault in the report of the job."""

    at_s: float  # seconds since the job began
    cycle: int  # -1 = before the first one
    kind: FaultKind
    host: str  # "" where no single node failed
    infra_rank: int
    rank: int  # global rank; -1 = the whole node
    local_rank: int
    exit_code: int  # negative = ended by that signal
    message: str  # one sentence about rank, node and fault, at most 400 characters
    rule: str = ""  # what the rules found; "" = nothing


class JobReport(Record):
    """What happened in the whole job, as far as this coordinator has seen it."""

    duration_s: float = 0.0  # since the job began
    cycles: int = 0  # cycles that were planned or carried on
    restarts_used: int = 0  # over all terms; of earlier terms `restarts` holds the last 8
    restarts: tuple[RestartRecord, ...] = ()  # oldest first, at most 1,000
    faults: tuple[FaultRecord, ...] = ()  # in order of arrival, at most the first 1,000
    faults_not_listed: int = 0  # faults beyond these
    last_faults: tuple[FaultRecord, ...] = ()  # of the latest cycle with faults; at most 1,000
    lost_nodes: tuple[str, ...] = ()  # hosts of active nodes that were lost, in order of loss; each once
    excluded_nodes: tuple[str, ...] = ()  # hosts that were excluded, by a request or an unfit check
    spares_used: tuple[str, ...] = ()  # hosts that took a group rank over, in order, each time; at most 64
    down_s: float = 0.0  # sum over all restarts of `RestartRecord.down_s`
    account: Account | None = None
    stragglers: tuple[StragglerRecord, ...] = ()  # at most 32
    out_of_time: bool = False  # stopped before the time limit of the allocation


class Plan(Record):
    """The assignment of a cycle, from the point of view of one member.

    The shared part is equal for all members; `group_rank` and `rank_offset` are the receiver's own, -1 for spares.
    """

    term: Count
    cycle: Count
    history: History
    max_restarts: Count
    active_nodes: Count
    world_size: Count
    master_addr: Name
    master_port: Port
    group_rank: Count = -1
    rank_offset: Count = -1
    leader: Peer | None = None  # the coordinator that sends it; None where the job elects none
    successors: AtMost32[Peer] = ()  # that may lead after it, in this order, at most 32
    electors: Count = 0  # size of the electorate; a coordinator needs a majority of those not in `dead`
    dead: AtMost4096[Name] = ()  # keys of nodes that do not vote: proven dead, or returned
    returned: AtMost4096[Name] = ()  # the part of `dead` that is alive again, and votes once each node has this plan
    forked: bool = True  # all ranks come from templates; False: one node cannot do that, so all execute them
    memory: MemoryPlan | None = None  # None: checkpoints in memory are not copied

    @property
    def active(self) -> bool:
        """Whether the receiver runs workers in this cycle (otherwise it is a hot spare)."""
        return self.group_rank >= 0


# --- before a registration ------------------------------------------------------------------------


class Hello(Record):
    """First message of an agent on every stream. Agents and coordinators of another protocol are refused."""

    version: Count  # of the protocol


class TokenRequest(Record):
    """An agent that proves with MUNGE that it belongs to the job's user asks for the job's token. Without TLS."""

    job: Name
    credential: Credential


class TokenReply(Record):
    """The answer, sealed for that user."""

    credential: Credential


# --- agent -> coordinator -------------------------------------------------------------------------


class Register(Record):
    """First message of an agent on every stream: all that a new coordinator needs in order to carry on."""

    node: Node
    port: Port  # a port bound by this agent, offered as MASTER_PORT should it become group rank 0
    plan: Plan | None = None  # the last one it took
    doing: Activity = Activity.IDLE
    faults: AtMost64[RankFault] = ()  # of its ranks in the cycle of that plan
    early: bool = False  # as in Succeeded
    vote: Count = 0  # the term for which it votes by registering
    votes: bool = True  # False: a coordinator has told that it has none before it has a plan
    led_s: Seconds = -1.0  # how long ago a coordinator led it last, at least; -1 = never
    led_term: Count = 0  # the term of that coordinator; it may have made a plan that this agent has not got
    number: Count = 0  # counts the registrations of this agent; one that comes after a later one is ignored
    end: Finish | None = None  # the end of the job, where a coordinator has told it
    counted: Counted | None = None  # the last one that it got
    held: InMemory | None = None  # checkpoints in memory; None: they are not copied

    @property
    def busy(self) -> bool:
        """Whether the agent has workers, or had them until they were all done."""
        return self.plan is not None and self.plan.active and self.doing not in (Activity.IDLE, Activity.PREPARING)


class RanksFailed(Record):
    """Ranks of this node failed. Under any-failed the agent already stops the others, under min-healthy they go on."""

    term: Count
    cycle: Count
    faults: OneTo64[RankFault]


class Hung(Record):
    """A rank of this node is hung. Its monitor waits a moment, so that all ranks can be looked at, and then ends it."""

    term: Count
    cycle: Count
    fault: RankFault
    doubted: bool = False  # it makes no steps: look whether it hangs, and end nothing until that is known


class Evidence(Record):
    """What the ranks of this node do: the answer to `Collect`. Ranks that could not be looked at are missing."""

    term: Count
    cycle: Count
    ranks_seen: AtMost64[RankEvidence]


class Succeeded(Record):
    """All workers of this node ended with 0."""

    term: Count
    cycle: Count
    early: bool = False  # a rank was told by `should_stop` to save its work and end


class Ready(Record):
    """This node is fit for the next plan, and no worker of that cycle is left on it. Term 0: it has had none."""

    term: Count
    cycle: Count
    port: Port
    held: InMemory | None = None  # as in Register


class Asked(Record):
    """A rank of this node made a workload control request."""

    term: Count
    cycle: Count
    action: WorkloadAction
    rank: Count
    description: Reason


class NodeUnfit(Record):
    """A health check says that this node must not be used."""

    term: Count
    cycle: Count
    reason: Reason


class WarnJob(Record):
    """This agent got the warning signal, and not every process of the job did: tell the others."""

    signum: Signum
    reason: Reason


class EndJob(Record):
    """This agent was told (by Slurm or a person) to end the job."""

    code: ExitStatus
    reason: Reason
    signum: Signum = 0  # the signal by which it was told, for the workers of the others; 0 = they are stopped as ever


class EndKnown(Record):
    """This agent knows the end of the job and has no workers left."""


class WhoLeads(Record):
    """Asks where the coordinator is. The stream is no registration; the answer is `Elsewhere`."""


# --- coordinator -> agent -------------------------------------------------------------------------


class Leave(Record):
    """All agents know the end of the job: exit."""


class Lead(Record):
    """The coordinator has a quorum in this term. Before that, a registration is only a vote."""

    term: Count
    votes: bool = True  # the receiver does; False: it came back, and has a vote once a plan says so


class Elsewhere(Record):
    """The node that was asked does not lead. It follows or seeks `peer`; `leads`: that node has said that it leads."""

    term: Count
    peer: Peer
    leads: bool


class Stop(Record):
    """Stop the workers of (and before) this cycle and report `Ready`."""

    term: Count
    cycle: Count
    reason: Reason
    wait_s: Seconds = 0.0  # ranks may end by themselves for so long before SIGTERM


class CheckNode(Record):
    """This spare may be needed: run the preflight and report `Ready`."""

    term: Count
    cycle: Count


class Collect(Record):
    """A rank of this cycle is hung: look at all ranks and answer with `Evidence`."""

    term: Count
    cycle: Count


class Finish(Record):
    """The job is over: stop what runs and exit with `code`."""

    code: ExitStatus
    reason: Reason
    signum: Signum = 0  # as in EndJob


class Refused(Record):
    """This agent is not taken; it exits with `code`."""

    code: ExitStatus
    reason: Reason


class Warn(Record):
    """The job is about to end (time limit, preemption): ranks should save their work."""

    signum: Signum
    reason: Reason


class RanksGone(Record):
    """Under min-healthy: these ranks of the cycle are dead; the in-process wrappers of the others want to know."""

    cycle: Count
    ranks: AtMost4096[Count]
    reason: Reason


AgentReport = RanksFailed | Hung | Evidence | Spent | Succeeded | Ready | EndKnown
AgentRequest = Asked | NodeUnfit | WarnJob | EndJob | WhoLeads
AgentMessage = Register | AgentReport | AgentRequest | Pace | Window | Examined | Imports | Warmth | Loaded
CoordinatorOrder = Plan | Counted | Stop | CheckNode | Collect | Examine | Warn | RanksGone | Finish | Leave
CoordinatorMessage = CoordinatorOrder | Lead | Elsewhere | Refused | LogServer | Imports
