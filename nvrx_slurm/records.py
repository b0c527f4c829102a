"""Records that need no others: findings, and where the time of a job goes (`core.account`). `types` has them, too."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.declared import (
    AtMost8,
    AtMost16,
    AtMost32,
    AtMost64,
    AtMost256,
    AtMost4096,
    Big,
    Count,
    Line,
    Name,
    Path,
    Port,
    Reason,
    Record,
    Seconds,
    Sentence,
)


class LineRole(str, Enum):
    """What a line in a rank's output says about the first cause of a fault."""

    CAUSE = "cause"  # it can be the first cause
    UNCLEAR = "unclear"  # it may be the first cause or a consequence
    ECHO = "echo"  # a consequence of a fault elsewhere


class Blame(str, Enum):
    """What is to blame for a fault."""

    USER = "user"  # the training script, its data or its settings
    NODE = "node"  # hardware, driver or system of one node
    NETWORK = "network"
    STORAGE = "storage"
    SERVICE = "service"  # a server outside the job
    SLURM = "slurm"  # a time limit, a preemption or a cancellation
    UNKNOWN = "unknown"


class Confidence(str, Enum):
    """How sure a rule is."""

    CERTAIN = "certain"  # only such a rule may exclude a node
    LIKELY = "likely"
    GUESS = "guess"


class Remedy(str, Enum):
    """What a rule advises."""

    RESTART = "restart"
    ELSEWHERE = "elsewhere"  # restart without that node
    STOP = "stop"  # a restart does not help
    NONE = "none"  # the fault elsewhere decides


class Finding(Record):
    """What the rules read from the output of one faulty rank (`core.attribution`)."""

    rule: Name  # name of the signature; "" = none matched
    role: LineRole
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    fingerprint: Name = ""  # equal for equal failures; 16 hexadecimal digits
    line: Line = ""  # the line that matched, at most 300 characters
    rests_on: Name = ""  # frame, field, text or exit: what it was read from
    node: Name = ""  # the node that the line names, if it names one


class Collective(Record):
    """The last collective that a rank has entered in one process group, as torch's flight recorder tells."""

    group: Name  # the group's name, equal on all its ranks
    seq: Big  # counts the collectives of the group, from 1
    what: Name  # operation and input sizes, for example "gloo:all_reduce [[4]]"
    open: bool  # it has not completed


class RankEvidence(Record):
    """What one rank does at the moment of a hang."""

    rank: Count
    infra_rank: Count
    host: Name
    state: Name = ""  # in /proc/PID/stat; "" = its node has not answered in time
    moves: bool = False  # it used processor time between two looks
    frames: AtMost16[
        Name
    ] = ()  # of its main thread, innermost first: "FILE:LINE in FUNCTION"; at most 12
    section: Name = ""  # the open section, as its monitor knows
    silent_s: Seconds = -1.0  # since its last sign of life; -1 = not known
    collectives: AtMost8[Collective] = ()  # one for each process group; at most 8
    local_rank: Count = -1
    pid: Count = 0
    log: Path = ""  # path of its stderr file on that node
    # ticks of processor time, bytes read and written, bytes over TCP, by it and all below it: before and after the look
    work: AtMost8[Big] = ()


class SectionTime(Record):
    """The time that ranks have spent in one section."""

    name: Name
    took_s: Seconds
    times: Count = 0  # how often it has ended


class NodeTime(Record):
    """Where the time of one node went (`core.account`), in seconds."""

    key: Name  # as `Peer.key`; "" = all nodes that are not told one by one
    host: Name
    role: Name  # what it does since the last plan, a value of `core.account.account.Role`
    seconds: AtMost32[Seconds]  # in the order of `core.account.account.BUCKETS`
    sections: AtMost16[SectionTime] = ()  # buckets of their own name


class Spent(Record):
    """How the ranks of this node spent their time in a cycle, sent once when none is left. Seconds of its own clock.

    A step that no rank has taken is -1. `sections`: of each name the most that a rank has spent in it.
    """

    term: Count
    cycle: Count
    start_s: Seconds = -1.0  # from the plan until the last of them was released
    import_s: Seconds = (
        -1.0
    )  # from there until the last one called init_workload_monitoring() or imported torch
    init_s: Seconds = (
        -1.0
    )  # from there until the first heartbeat, first "step", or step, of the last one
    reload_s: Seconds = 0.0  # by which the first step was longer than the others
    suspended_s: Seconds = 0.0  # stopped by somebody
    # from the end of the last section of kind checkpoint until this message
    saved_s: Seconds = -1.0
    after_s: Seconds = 0.0  # the part of it in other sections than "step"
    sections: AtMost16[SectionTime] = ()  # at most 16
    idle: bool = False  # steps of its ranks would have been seen, and there was none
    reached: Big = -1  # iteration: the last one in memory, and steps since then; -1 = not known


class RankPace(Record):
    """How far a rank is. Seconds of its node's clock."""

    rank: Count
    steps: Big  # heartbeats, sections "step", or steps of an optimizer, in this life
    step_s: Seconds  # from one to the next, lately; 0 = not known
    section: Name = ""  # the open section that began last; "" = none
    section_s: Seconds = 0.0  # since then
    still_s: Seconds = 0.0  # since the last of its steps


class Pace(Record):
    """How far the living ranks of this node are, told every few seconds; of all, when the last of them has ended. It is
    shown; nothing is decided by it."""

    term: Count
    cycle: Count
    paces: AtMost64[RankPace]  # at most 64


class Window(Record):
    """How long the living ranks of this node have waited for others in this life; entry i of each field is of rank i.
    For `core.straggler`. At most 4,096 ranks."""

    term: Count
    cycle: Count
    ranks: AtMost4096[Count]
    waits: AtMost4096[Big]  # waiting sections that have ended
    waited_s: AtMost4096[Seconds]  # in them, and in sections that save, load or prepare
    until_s: AtMost4096[Seconds]  # when the last of them ended; seconds of the node's clock


class Examine(Record):
    """A rank of this node is slow: look for reasons on the node."""

    term: Count
    cycle: Count


class Examined(Record):
    """The answer: what slows this node down; "" = nothing was found."""

    term: Count
    cycle: Count
    message: Sentence


class LogServer(Record):
    """Where the coordinator's node takes lines for the merged logs: at the first of `ports`."""

    term: Count
    ports: AtMost64[Port]  # at most 64


class Imported(Record):
    """A module that the ranks import, after they have changed these variables. A value "\0": not set any more."""

    module: Name
    names: AtMost256[Name] = ()  # at most 256
    values: AtMost256[Path] = ()


class Imports(Record):
    """What active nodes have seen their ranks import: spares prepare for it. It may hold secrets: it is not logged."""

    modules: AtMost32[Imported]  # at most 32


class Warmth(Record):
    """Whether ranks can be forked on this node, told when that changes."""

    modules: AtMost32[Name]  # that its template has imported; at most 32
    reason: Reason = ""  # why they have to be executed; "" = they can be forked


class StragglerRecord(Record):
    """Slow ranks, a node, a switch or the whole job."""

    at_s: float  # when it was first seen
    cycle: int
    where: str  # rank, node, switch, imbalance or all; see core.straggler.detector.Where
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str  # a sentence
    excess: float  # work above the peers' median, as a share of that
    lost_s: float = 0.0  # what it has cost the job
    # host or rank: what the slowness stayed with when a restart had moved ranks; "" = not known
    follows: str = ""
    signs: str = ""  # what was found on the node


class Account(Record):
    """Where the time of a job, or of a part of a chain, went. `core.account.report` makes JSON and ratios of it."""

    wall_s: Seconds  # since the job began
    productive_s: Seconds  # of the job: in each cycle the mean of its active nodes
    nodes: AtMost32[NodeTime]  # the first 1,000, and one entry for all others
    estimated: AtMost32[Name] = ()  # buckets in which something had to be estimated
    saves: SectionTime = SectionTime("", 0.0)  # sections that save, of all nodes
    # the part of reload after a load that was told, of all nodes, by source: memory, peer or disk
    reloads: AtMost8[SectionTime] = ()


class CycleCost(Record):
    """What a cycle has cost, in seconds: means of its active nodes."""

    cycle: Count
    again_s: Seconds  # until it trained at its pace
    recomputed_s: Seconds  # work since its last checkpoint
    reached: Big = -1  # as in Spent
    steps: Big = -1  # that the next cycle has done again, from there; -1 = not known


class Counted(Record):
    """The account until a plan. All agents get it after that plan, and tell it to the next coordinator."""

    cycle: Count  # the cycle of that plan
    account: Account  # with at most 32 nodes
    costs: AtMost16[CycleCost] = ()  # of the last 9 cycles


class Alike(Record):
    """Another node that failed like the first cause, at the same time."""

    infra_rank: Count
    host: Name
    rank: Count


class Peer(Record):
    """Where another agent of the job listens."""

    key: Name  # names the node over all lives of its agent: its infra rank, or its node_id where it has none
    host: Name  # for people
    addr: Name
    port: Port  # 0 = one of the ports that the job may use there


class Kept(Record):
    """A whole state of one rank in a node's memory, the rank's own or a copy of another node's."""

    rank: Count
    world: Count  # how many ranks the job had
    cycle: Count  # the cycle that saved it
    iteration: Big


class Loaded(Record):
    """What checkpoint.load() has found for all ranks of a cycle. The first rank tells it."""

    cycle: Count
    iteration: Big  # -1: it was not in memory
    source: Name  # memory, peer or disk
    took_s: Seconds
    message: Line = ""  # for people; "" = nothing is new


class InMemory(Record):
    """What the keeper of a node has, and where it answers other nodes."""

    address: Name
    port: Port
    kept: AtMost256[Kept] = ()  # at most 256


class Wanted(Record):
    """A state of a rank of the receiver, and the keeper that has it, too."""

    rank: Count
    cycle: Count
    iteration: Big
    address: Name
    port: Port


class MemoryPlan(Record):
    """What a node's keeper has to do in a cycle."""

    address: Name = ""  # of the keeper that gets copies; "" = none does
    port: Port = 0
    wanted: AtMost256[Wanted] = ()  # what its ranks may load, in the order of use; at most 256
