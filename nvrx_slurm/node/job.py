"""All that one agent needs to know about its job: derived once from flags, environment and Slurm (cli/job.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.coordinator import CoordinatorSettings
from nvrx_slurm.core.coordinator.status import JobLabels
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.control import Control
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.types import Node, Peer

if TYPE_CHECKING:
    from nvrx_slurm.attribution.records import AttributionSpec
    from nvrx_slurm.config.otel import OtlpTarget
    from nvrx_slurm.core.chain import ChainLimits
    from nvrx_slurm.core.logs.cycle_info import CycleFiles
    from nvrx_slurm.node.output.logs import LogSpec
    from nvrx_slurm.node.preflight.head_start import PreflightSpec
    from nvrx_slurm.node.workers.worker_spec import WorkerSpec


_PORTS, _PORT_STEP = range(20000, 30000), 131  # see slurm.env.coordinator_ports


@dataclass(frozen=True)
class Meeting:
    """How the agents of a job with several nodes find each other."""

    key: str  # names the job to its agents: one with another key is refused
    endpoints: tuple[tuple[str, int], ...]  # where the coordinator may listen, in the order of trying
    token: str = field(repr=False)  # "" = have MUNGE hand it over
    keepalive: tuple[float, float] = (5.0, 5.0)  # interval and timeout, seconds
    munge_socket: str | None = None
    ports: tuple[int, ...] = ()  # where an agent of the job may listen on its host, before the first plan
    candidates: tuple[Peer, ...] = ()  # that may coordinate before the first plan, in this order
    mine: tuple[tuple[str, int], ...] = ()  # which of --rdzv-endpoint's further addresses are this machine's
    control: Control = field(default_factory=Control, repr=False)
    first_try_s: float = 5.0  # how long the first of them is tried before the next

    def ports_of(self, key: str) -> list[int]:
        """Where the agent of a node (`types.Peer.key`) may listen. Several nodes of a test cluster share a host."""
        shift = int(key) * _PORT_STEP if key.isdecimal() and len(self.ports) > 1 else 0
        return [_PORTS.start + (port - _PORTS.start + shift) % len(_PORTS) if shift else port for port in self.ports]


@dataclass(frozen=True)
class NodeJob:
    """One agent's view of the job."""

    node: Node
    run_dir: RunDir
    spec: WorkerSpec
    agent: AgentSettings
    preflight: PreflightSpec
    labels: JobLabels
    coordinator: CoordinatorSettings | None  # None: another node is the first coordinator
    meeting: Meeting | None  # None: one node, nothing to meet
    slurm: SlurmContext | None = None  # None: outside Slurm
    control: Control = field(default_factory=Control, repr=False)  # asks Slurm
    progress_file: str | None = None  # the checkpoint iteration file; None: cycles are not scored
    checkpoints: tuple[str, str | None] | None = None  # their directory, and the pattern of their names
    electable: CoordinatorSettings | None = None  # of whichever node coordinates; None: the job has one node
    attribution: AttributionSpec | None = None  # None: no service, rules only
    logs: LogSpec | None = None  # None: no merged logs
    cycle_info: CycleFiles | None = None  # None: none is written
    until_done: ChainLimits | None = None  # None: the job is not requeued
    notify: str | None = None  # the URL that gets news
    slurm_comment: bool = False  # the Comment of the Slurm job tells the state
    metrics_file: str | None = None  # for node_exporter
    otlp: OtlpTarget | None = None  # the collector that gets metrics
    began_s: float = 0.0  # when its first nvrx-run began, as far as this one knows (Unix seconds)
    may_yield: bool = False  # be an ordinary agent where somebody else listens at the endpoint already
