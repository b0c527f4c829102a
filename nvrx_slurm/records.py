"""Records that need no others: findings, and where the time of a job goes (`core.account`). `types` has them, too."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.frozen import frozen


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


@frozen
class Finding:
    """What the rules read from the output of one faulty rank (`core.attribution`)."""

    rule: str  # name of the signature; "" = none matched
    role: LineRole
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    fingerprint: str = ""  # equal for equal failures; 16 hexadecimal digits
    line: str = ""  # the line that matched, at most 300 characters


@frozen
class Collective:
    """The last collective that a rank has entered in one process group, as torch's flight recorder tells."""

    group: str  # the group's name, equal on all its ranks
    seq: int  # counts the collectives of the group, from 1
    what: str  # operation and input sizes, for example "gloo:all_reduce [[4]]"
    open: bool  # it has not completed


@frozen
class SectionTime:
    """The time that ranks have spent in one section."""

    name: str
    took_s: float
    times: int = 0  # how often it has ended


@frozen
class NodeTime:
    """Where the time of one node went (`core.account`), in seconds."""

    key: str  # as `Peer.key`; "" = all nodes that are not told one by one
    host: str
    role: str  # what it does since the last plan, a value of `core.account.account.Role`
    seconds: tuple[float, ...]  # in the order of `core.account.account.BUCKETS`
    sections: tuple[SectionTime, ...] = ()  # buckets of their own name


@frozen
class Spent:
    """How the ranks of this node spent their time in a cycle, sent once when none is left. Seconds of its own clock.

    A step that no rank has taken is -1. `sections`: of each name the most that a rank has spent in it.
    """

    term: int
    cycle: int
    start_s: float = -1.0  # from the plan until the last of them was released
    import_s: float = -1.0  # from there until the last one called init_workload_monitoring()
    init_s: float = -1.0  # from there until the first heartbeat, or first "step", of the last one
    reload_s: float = 0.0  # by which the first step was longer than the others
    suspended_s: float = 0.0  # stopped by somebody
    saved_s: float = -1.0  # from the end of the last section of kind checkpoint until this message
    after_s: float = 0.0  # of that, in other sections than "step"
    sections: tuple[SectionTime, ...] = ()  # at most 16


@frozen
class RankPace:
    """How far a living rank is. Seconds of its node's clock."""

    rank: int
    steps: int  # heartbeats, or sections "step", in this life
    step_s: float  # from one to the next, lately; 0 = not known
    section: str = ""  # that began last of those that are open; "" = none
    section_s: float = 0.0  # since then


@frozen
class Pace:
    """How far the living ranks of this node are, told every few seconds. It is shown; nothing is decided by it."""

    term: int
    cycle: int
    paces: tuple[RankPace, ...]  # at most 64


@frozen
class Window:
    """How long the living ranks of this node have waited for others in this life; entry i of each field is of rank i.
    For `core.straggler`. At most 4,096 ranks."""

    term: int
    cycle: int
    ranks: tuple[int, ...]
    waits: tuple[int, ...]  # waiting sections that have ended
    waited_s: tuple[float, ...]  # in them, and in sections that save, load or prepare
    until_s: tuple[float, ...]  # when the last of them ended; seconds of the node's clock


@frozen
class Examine:
    """A rank of this node is slow: look for reasons on the node."""

    term: int
    cycle: int


@frozen
class Examined:
    """The answer: what slows this node down; "" = nothing was found."""

    term: int
    cycle: int
    message: str


@frozen
class LogServer:
    """Where the coordinator's node takes lines for the merged logs: at the first of `ports`."""

    term: int
    ports: tuple[int, ...]  # at most 64


@frozen
class Imported:
    """A module that the ranks import, after they have changed these variables. A value "\0": not set any more."""

    module: str
    names: tuple[str, ...] = ()  # at most 256
    values: tuple[str, ...] = ()


@frozen
class Imports:
    """What active nodes have seen their ranks import: spares prepare for it. It may hold secrets: it is not logged."""

    modules: tuple[Imported, ...]  # at most 32


@frozen
class Warmth:
    """Whether ranks can be forked on this node, told when that changes."""

    modules: tuple[str, ...]  # that its template has imported; at most 32
    reason: str = ""  # why they have to be executed; "" = they can be forked


@frozen
class StragglerRecord:
    """Slow ranks, a node, a switch or the whole job."""

    at_s: float  # when it was first seen
    cycle: int
    where: str  # rank, node, switch, imbalance or all; see core.straggler.detector.Where
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    what: str  # a sentence
    excess: float  # work above the peers' median, as a share of that
    lost_s: float = 0.0  # what it has cost the job
    follows: str = ""  # host or rank: what the slowness stayed with when a restart had moved ranks; "" = not known
    signs: str = ""  # what was found on the node


@frozen
class Account:
    """Where the time of a job, or of a part of a chain, went. `core.account.report` makes JSON and ratios of it."""

    wall_s: float  # since the job began
    productive_s: float  # of the job: in each cycle the mean of its active nodes
    nodes: tuple[NodeTime, ...]  # the first 1,000, and one entry for all others
    estimated: tuple[str, ...] = ()  # buckets in which something had to be estimated
    saves: SectionTime = SectionTime("", 0.0)  # sections that save, of all nodes


@frozen
class CycleCost:
    """What a cycle has cost, in seconds: means of its active nodes."""

    cycle: int
    again_s: float  # until it trained at its pace
    recomputed_s: float  # work since its last checkpoint


@frozen
class Counted:
    """The account until a plan. All agents get it after that plan, and tell it to the next coordinator."""

    cycle: int  # of that plan
    account: Account  # with at most 32 nodes
    costs: tuple[CycleCost, ...] = ()  # of the last 9 cycles
