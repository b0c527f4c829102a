from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromAgent(_message.Message):
    __slots__ = ("hello", "register", "ranks_failed", "succeeded", "ready", "end_job", "asked", "warn_job", "end_known", "who_leads", "hung", "evidence", "node_unfit", "spent", "pace", "window", "examined", "imports", "warmth")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    SUCCEEDED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    END_JOB_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    WARN_JOB_FIELD_NUMBER: _ClassVar[int]
    END_KNOWN_FIELD_NUMBER: _ClassVar[int]
    WHO_LEADS_FIELD_NUMBER: _ClassVar[int]
    HUNG_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    NODE_UNFIT_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    EXAMINED_FIELD_NUMBER: _ClassVar[int]
    IMPORTS_FIELD_NUMBER: _ClassVar[int]
    WARMTH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    register: Register
    ranks_failed: RanksFailed
    succeeded: Succeeded
    ready: Ready
    end_job: EndJob
    asked: Asked
    warn_job: WarnJob
    end_known: EndKnown
    who_leads: WhoLeads
    hung: Hung
    evidence: Evidence
    node_unfit: NodeUnfit
    spent: Spent
    pace: Pace
    window: Window
    examined: Examined
    imports: Imports
    warmth: Warmth
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., register: _Optional[_Union[Register, _Mapping]] = ..., ranks_failed: _Optional[_Union[RanksFailed, _Mapping]] = ..., succeeded: _Optional[_Union[Succeeded, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., end_job: _Optional[_Union[EndJob, _Mapping]] = ..., asked: _Optional[_Union[Asked, _Mapping]] = ..., warn_job: _Optional[_Union[WarnJob, _Mapping]] = ..., end_known: _Optional[_Union[EndKnown, _Mapping]] = ..., who_leads: _Optional[_Union[WhoLeads, _Mapping]] = ..., hung: _Optional[_Union[Hung, _Mapping]] = ..., evidence: _Optional[_Union[Evidence, _Mapping]] = ..., node_unfit: _Optional[_Union[NodeUnfit, _Mapping]] = ..., spent: _Optional[_Union[Spent, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., examined: _Optional[_Union[Examined, _Mapping]] = ..., imports: _Optional[_Union[Imports, _Mapping]] = ..., warmth: _Optional[_Union[Warmth, _Mapping]] = ...) -> None: ...

class FromCoordinator(_message.Message):
    __slots__ = ("plan", "stop", "finish", "refused", "warn", "ranks_gone", "leave", "lead", "elsewhere", "collect", "check_node", "counted", "log_server", "examine", "imports")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    WARN_FIELD_NUMBER: _ClassVar[int]
    RANKS_GONE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    LEAD_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    CHECK_NODE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    LOG_SERVER_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    IMPORTS_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    stop: Stop
    finish: Finish
    refused: Refused
    warn: Warn
    ranks_gone: RanksGone
    leave: Leave
    lead: Lead
    elsewhere: Elsewhere
    collect: Collect
    check_node: CheckNode
    counted: Counted
    log_server: LogServer
    examine: Examine
    imports: Imports
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., warn: _Optional[_Union[Warn, _Mapping]] = ..., ranks_gone: _Optional[_Union[RanksGone, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., lead: _Optional[_Union[Lead, _Mapping]] = ..., elsewhere: _Optional[_Union[Elsewhere, _Mapping]] = ..., collect: _Optional[_Union[Collect, _Mapping]] = ..., check_node: _Optional[_Union[CheckNode, _Mapping]] = ..., counted: _Optional[_Union[Counted, _Mapping]] = ..., log_server: _Optional[_Union[LogServer, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ..., imports: _Optional[_Union[Imports, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "infra_rank", "host", "addr", "nproc", "order", "port", "domain")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INFRA_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDR_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    infra_rank: int
    host: str
    addr: str
    nproc: int
    order: _containers.RepeatedScalarFieldContainer[int]
    port: int
    domain: str
    def __init__(self, node_id: _Optional[str] = ..., infra_rank: _Optional[int] = ..., host: _Optional[str] = ..., addr: _Optional[str] = ..., nproc: _Optional[int] = ..., order: _Optional[_Iterable[int]] = ..., port: _Optional[int] = ..., domain: _Optional[str] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("node", "port", "plan", "doing", "faults", "early", "vote", "number", "end", "counted", "votes", "led_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    LED_S_FIELD_NUMBER: _ClassVar[int]
    node: Node
    port: int
    plan: Plan
    doing: str
    faults: _containers.RepeatedCompositeFieldContainer[RankFault]
    early: bool
    vote: int
    number: int
    end: Finish
    counted: Counted
    votes: bool
    led_s: float
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., port: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., doing: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[RankFault, _Mapping]]] = ..., early: bool = ..., vote: _Optional[int] = ..., number: _Optional[int] = ..., end: _Optional[_Union[Finish, _Mapping]] = ..., counted: _Optional[_Union[Counted, _Mapping]] = ..., votes: bool = ..., led_s: _Optional[float] = ...) -> None: ...

class RankFault(_message.Message):
    __slots__ = ("kind", "host", "infra_rank", "rank", "local_rank", "pid", "exit_code", "message", "traceback", "log", "finding", "silent_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    INFRA_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    FINDING_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    host: str
    infra_rank: int
    rank: int
    local_rank: int
    pid: int
    exit_code: int
    message: str
    traceback: str
    log: str
    finding: Finding
    silent_s: float
    def __init__(self, kind: _Optional[str] = ..., host: _Optional[str] = ..., infra_rank: _Optional[int] = ..., rank: _Optional[int] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., log: _Optional[str] = ..., finding: _Optional[_Union[Finding, _Mapping]] = ..., silent_s: _Optional[float] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("rule", "role", "blame", "confidence", "remedy", "fingerprint", "line")
    RULE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BLAME_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    rule: str
    role: str
    blame: str
    confidence: str
    remedy: str
    fingerprint: str
    line: str
    def __init__(self, rule: _Optional[str] = ..., role: _Optional[str] = ..., blame: _Optional[str] = ..., confidence: _Optional[str] = ..., remedy: _Optional[str] = ..., fingerprint: _Optional[str] = ..., line: _Optional[str] = ...) -> None: ...

class RankEvidence(_message.Message):
    __slots__ = ("rank", "infra_rank", "host", "state", "moves", "frames", "section", "silent_s", "collectives", "local_rank", "pid", "log")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INFRA_RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    rank: int
    infra_rank: int
    host: str
    state: str
    moves: bool
    frames: _containers.RepeatedScalarFieldContainer[str]
    section: str
    silent_s: float
    collectives: _containers.RepeatedCompositeFieldContainer[Collective]
    local_rank: int
    pid: int
    log: str
    def __init__(self, rank: _Optional[int] = ..., infra_rank: _Optional[int] = ..., host: _Optional[str] = ..., state: _Optional[str] = ..., moves: bool = ..., frames: _Optional[_Iterable[str]] = ..., section: _Optional[str] = ..., silent_s: _Optional[float] = ..., collectives: _Optional[_Iterable[_Union[Collective, _Mapping]]] = ..., local_rank: _Optional[int] = ..., pid: _Optional[int] = ..., log: _Optional[str] = ...) -> None: ...

class Collective(_message.Message):
    __slots__ = ("group", "seq", "what", "open")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    group: str
    seq: int
    what: str
    open: bool
    def __init__(self, group: _Optional[str] = ..., seq: _Optional[int] = ..., what: _Optional[str] = ..., open: bool = ...) -> None: ...

class RanksFailed(_message.Message):
    __slots__ = ("term", "cycle", "faults")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    faults: _containers.RepeatedCompositeFieldContainer[RankFault]
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[RankFault, _Mapping]]] = ...) -> None: ...

class Hung(_message.Message):
    __slots__ = ("term", "cycle", "fault")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    fault: RankFault
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., fault: _Optional[_Union[RankFault, _Mapping]] = ...) -> None: ...

class Evidence(_message.Message):
    __slots__ = ("term", "cycle", "ranks_seen")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_SEEN_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    ranks_seen: _containers.RepeatedCompositeFieldContainer[RankEvidence]
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., ranks_seen: _Optional[_Iterable[_Union[RankEvidence, _Mapping]]] = ...) -> None: ...

class Spent(_message.Message):
    __slots__ = ("term", "cycle", "start_s", "import_s", "init_s", "reload_s", "suspended_s", "saved_s", "sections", "after_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    IMPORT_S_FIELD_NUMBER: _ClassVar[int]
    INIT_S_FIELD_NUMBER: _ClassVar[int]
    RELOAD_S_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    start_s: float
    import_s: float
    init_s: float
    reload_s: float
    suspended_s: float
    saved_s: float
    sections: _containers.RepeatedCompositeFieldContainer[SectionTime]
    after_s: float
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., start_s: _Optional[float] = ..., import_s: _Optional[float] = ..., init_s: _Optional[float] = ..., reload_s: _Optional[float] = ..., suspended_s: _Optional[float] = ..., saved_s: _Optional[float] = ..., sections: _Optional[_Iterable[_Union[SectionTime, _Mapping]]] = ..., after_s: _Optional[float] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("term", "cycle", "paces")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    paces: _containers.RepeatedCompositeFieldContainer[RankPace]
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., paces: _Optional[_Iterable[_Union[RankPace, _Mapping]]] = ...) -> None: ...

class RankPace(_message.Message):
    __slots__ = ("rank", "steps", "step_s", "section", "section_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SECTION_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    steps: int
    step_s: float
    section: str
    section_s: float
    def __init__(self, rank: _Optional[int] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., section: _Optional[str] = ..., section_s: _Optional[float] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("term", "cycle", "ranks", "waits", "waited_s", "until_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    waits: _containers.RepeatedScalarFieldContainer[int]
    waited_s: _containers.RepeatedScalarFieldContainer[float]
    until_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., waits: _Optional[_Iterable[int]] = ..., waited_s: _Optional[_Iterable[float]] = ..., until_s: _Optional[_Iterable[float]] = ...) -> None: ...

class Warmth(_message.Message):
    __slots__ = ("modules", "reason")
    MODULES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, modules: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class Imports(_message.Message):
    __slots__ = ("modules",)
    MODULES_FIELD_NUMBER: _ClassVar[int]
    modules: _containers.RepeatedCompositeFieldContainer[Imported]
    def __init__(self, modules: _Optional[_Iterable[_Union[Imported, _Mapping]]] = ...) -> None: ...

class Imported(_message.Message):
    __slots__ = ("module", "names", "values")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    module: str
    names: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, module: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[str]] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("term", "cycle")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ...) -> None: ...

class Examined(_message.Message):
    __slots__ = ("term", "cycle", "message")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    message: str
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SectionTime(_message.Message):
    __slots__ = ("name", "took_s", "times")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    name: str
    took_s: float
    times: int
    def __init__(self, name: _Optional[str] = ..., took_s: _Optional[float] = ..., times: _Optional[int] = ...) -> None: ...

class NodeTime(_message.Message):
    __slots__ = ("key", "host", "role", "seconds", "sections")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    key: str
    host: str
    role: str
    seconds: _containers.RepeatedScalarFieldContainer[float]
    sections: _containers.RepeatedCompositeFieldContainer[SectionTime]
    def __init__(self, key: _Optional[str] = ..., host: _Optional[str] = ..., role: _Optional[str] = ..., seconds: _Optional[_Iterable[float]] = ..., sections: _Optional[_Iterable[_Union[SectionTime, _Mapping]]] = ...) -> None: ...

class CycleCost(_message.Message):
    __slots__ = ("cycle", "again_s", "recomputed_s")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    again_s: float
    recomputed_s: float
    def __init__(self, cycle: _Optional[int] = ..., again_s: _Optional[float] = ..., recomputed_s: _Optional[float] = ...) -> None: ...

class Account(_message.Message):
    __slots__ = ("wall_s", "productive_s", "nodes", "estimated", "saves")
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    PRODUCTIVE_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    wall_s: float
    productive_s: float
    nodes: _containers.RepeatedCompositeFieldContainer[NodeTime]
    estimated: _containers.RepeatedScalarFieldContainer[str]
    saves: SectionTime
    def __init__(self, wall_s: _Optional[float] = ..., productive_s: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[NodeTime, _Mapping]]] = ..., estimated: _Optional[_Iterable[str]] = ..., saves: _Optional[_Union[SectionTime, _Mapping]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("cycle", "account", "costs")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    account: Account
    costs: _containers.RepeatedCompositeFieldContainer[CycleCost]
    def __init__(self, cycle: _Optional[int] = ..., account: _Optional[_Union[Account, _Mapping]] = ..., costs: _Optional[_Iterable[_Union[CycleCost, _Mapping]]] = ...) -> None: ...

class Succeeded(_message.Message):
    __slots__ = ("term", "cycle", "early")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    early: bool
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., early: bool = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("term", "cycle", "port")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    port: int
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., port: _Optional[int] = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("term", "cycle", "action", "rank", "description")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    action: int
    rank: int
    description: str
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., action: _Optional[int] = ..., rank: _Optional[int] = ..., description: _Optional[str] = ...) -> None: ...

class NodeUnfit(_message.Message):
    __slots__ = ("term", "cycle", "reason")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    reason: str
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WarnJob(_message.Message):
    __slots__ = ("signum", "reason")
    SIGNUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    signum: int
    reason: str
    def __init__(self, signum: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EndJob(_message.Message):
    __slots__ = ("code", "reason", "signum")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNUM_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    signum: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., signum: _Optional[int] = ...) -> None: ...

class KindCount(_message.Message):
    __slots__ = ("kind", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("restarts_used", "spent", "no_progress", "iteration", "excluded", "began_s", "down_s", "restarts", "lost", "promoted", "resume_before", "resume_from")
    RESTARTS_USED_FIELD_NUMBER: _ClassVar[int]
    SPENT_FIELD_NUMBER: _ClassVar[int]
    NO_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_S_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    RESUME_BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    restarts_used: int
    spent: _containers.RepeatedCompositeFieldContainer[KindCount]
    no_progress: int
    iteration: int
    excluded: _containers.RepeatedScalarFieldContainer[str]
    began_s: float
    down_s: float
    restarts: _containers.RepeatedCompositeFieldContainer[RestartRecord]
    lost: _containers.RepeatedScalarFieldContainer[str]
    promoted: _containers.RepeatedScalarFieldContainer[str]
    resume_before: int
    resume_from: str
    def __init__(self, restarts_used: _Optional[int] = ..., spent: _Optional[_Iterable[_Union[KindCount, _Mapping]]] = ..., no_progress: _Optional[int] = ..., iteration: _Optional[int] = ..., excluded: _Optional[_Iterable[str]] = ..., began_s: _Optional[float] = ..., down_s: _Optional[float] = ..., restarts: _Optional[_Iterable[_Union[RestartRecord, _Mapping]]] = ..., lost: _Optional[_Iterable[str]] = ..., promoted: _Optional[_Iterable[str]] = ..., resume_before: _Optional[int] = ..., resume_from: _Optional[str] = ...) -> None: ...

class RestartRecord(_message.Message):
    __slots__ = ("cycle", "at_s", "down_s", "cause", "rank", "fingerprint", "host", "exit_code", "iteration", "checkpoint", "elsewhere", "infra_rank", "alone", "ran_s", "detect_s", "recomputed_s", "again_s")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    INFRA_RANK_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    RAN_S_FIELD_NUMBER: _ClassVar[int]
    DETECT_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    AGAIN_S_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    at_s: float
    down_s: float
    cause: str
    rank: int
    fingerprint: str
    host: str
    exit_code: int
    iteration: int
    checkpoint: int
    elsewhere: bool
    infra_rank: int
    alone: bool
    ran_s: float
    detect_s: float
    recomputed_s: float
    again_s: float
    def __init__(self, cycle: _Optional[int] = ..., at_s: _Optional[float] = ..., down_s: _Optional[float] = ..., cause: _Optional[str] = ..., rank: _Optional[int] = ..., fingerprint: _Optional[str] = ..., host: _Optional[str] = ..., exit_code: _Optional[int] = ..., iteration: _Optional[int] = ..., checkpoint: _Optional[int] = ..., elsewhere: bool = ..., infra_rank: _Optional[int] = ..., alone: bool = ..., ran_s: _Optional[float] = ..., detect_s: _Optional[float] = ..., recomputed_s: _Optional[float] = ..., again_s: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("term", "cycle", "history", "max_restarts", "active_nodes", "world_size", "master_addr", "master_port", "group_rank", "rank_offset", "leader", "successors", "electors", "dead", "returned", "forked")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    MAX_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_NODES_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MASTER_ADDR_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    ELECTORS_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    FORKED_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    history: History
    max_restarts: int
    active_nodes: int
    world_size: int
    master_addr: str
    master_port: int
    group_rank: int
    rank_offset: int
    leader: Peer
    successors: _containers.RepeatedCompositeFieldContainer[Peer]
    electors: int
    dead: _containers.RepeatedScalarFieldContainer[str]
    returned: _containers.RepeatedScalarFieldContainer[str]
    forked: bool
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., history: _Optional[_Union[History, _Mapping]] = ..., max_restarts: _Optional[int] = ..., active_nodes: _Optional[int] = ..., world_size: _Optional[int] = ..., master_addr: _Optional[str] = ..., master_port: _Optional[int] = ..., group_rank: _Optional[int] = ..., rank_offset: _Optional[int] = ..., leader: _Optional[_Union[Peer, _Mapping]] = ..., successors: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., electors: _Optional[int] = ..., dead: _Optional[_Iterable[str]] = ..., returned: _Optional[_Iterable[str]] = ..., forked: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("key", "host", "addr", "port")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDR_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    key: str
    host: str
    addr: str
    port: int
    def __init__(self, key: _Optional[str] = ..., host: _Optional[str] = ..., addr: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("term", "cycle", "reason", "wait_s")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    reason: str
    wait_s: float
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ..., reason: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class CheckNode(_message.Message):
    __slots__ = ("term", "cycle")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ...) -> None: ...

class Collect(_message.Message):
    __slots__ = ("term", "cycle")
    TERM_FIELD_NUMBER: _ClassVar[int]
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    term: int
    cycle: int
    def __init__(self, term: _Optional[int] = ..., cycle: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("code", "reason", "signum")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SIGNUM_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    signum: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., signum: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Warn(_message.Message):
    __slots__ = ("signum", "reason")
    SIGNUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    signum: int
    reason: str
    def __init__(self, signum: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class EndKnown(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoLeads(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lead(_message.Message):
    __slots__ = ("term", "votes")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VOTES_FIELD_NUMBER: _ClassVar[int]
    term: int
    votes: bool
    def __init__(self, term: _Optional[int] = ..., votes: bool = ...) -> None: ...

class Elsewhere(_message.Message):
    __slots__ = ("term", "peer", "leads")
    TERM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    term: int
    peer: Peer
    leads: bool
    def __init__(self, term: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., leads: bool = ...) -> None: ...

class LogServer(_message.Message):
    __slots__ = ("term", "ports")
    TERM_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    ports: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, term: _Optional[int] = ..., ports: _Optional[_Iterable[int]] = ...) -> None: ...

class RanksGone(_message.Message):
    __slots__ = ("cycle", "ranks", "reason")
    CYCLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    cycle: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, cycle: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class TokenRequest(_message.Message):
    __slots__ = ("job", "credential")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    job: str
    credential: str
    def __init__(self, job: _Optional[str] = ..., credential: _Optional[str] = ...) -> None: ...

class TokenReply(_message.Message):
    __slots__ = ("credential",)
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    credential: str
    def __init__(self, credential: _Optional[str] = ...) -> None: ...
