"""Settings of the launcher: torchrun's flags and our own few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nvrx_slurm.config import values as v
from nvrx_slurm.config.settings import (
    CONFIGURATION,
    DEVICES,
    HEALTH,
    LOGS,
    MONITORING,
    NODES,
    RENDEZVOUS,
    RESTARTS,
    SLURM,
    TORCHRUN,
    Section,
    setting,
)
from nvrx_slurm.config.values import NodeRange, RendezvousConfig, Streams
from nvrx_slurm.errors import UsageError


@dataclass(frozen=True)
class LaunchConfig(Section):
    """What to start, where and how. Times in seconds. Flags and environment only, never YAML."""

    section: ClassVar[str] = "launch"

    nnodes: NodeRange | None = setting(
        v.optional(v.NNODES),
        None,
        NODES,
        env="pet",
        help="MIN nodes train, MAX-MIN are hot spares. Default: all nodes of the Slurm allocation, less --spares; "
        "1 outside Slurm.",
    )
    nproc_per_node: int | str | None = setting(
        v.optional(v.NPROC),
        None,
        NODES,
        env="pet",
        help="Workers per node. Default: the GPUs that Slurm gave the node, else 1.",
    )
    node_rank: int | None = setting(
        v.optional(v.integer(0, v.MAX_NODES)),
        None,
        NODES,
        env="pet",
        help="Place of this node among the nodes, from 0. Default: Slurm's order.",
    )
    local_addr: str | None = setting(
        v.optional(v.ADDRESS),
        None,
        NODES,
        env="pet",
        help="Name or address under which other nodes reach this one. Default: Slurm's node address.",
    )
    standalone: bool = setting(
        v.BOOL,
        False,
        NODES,
        env="pet",
        form="switch",
        help="One node, right here, no rendezvous with others (also on a login node).",
    )
    role: str = setting(v.TEXT, "default", NODES, env="pet", help="ROLE_NAME of the workers.")
    module: bool = setting(
        v.BOOL,
        False,
        NODES,
        env="pet",
        form="switch",
        aliases=("-m",),
        help="The script is a Python module: run it as python -m does.",
    )
    no_python: bool = setting(
        v.BOOL,
        False,
        NODES,
        env="pet",
        form="switch",
        help="The script is a program of its own: start it without Python.",
    )
    run_path: bool = setting(
        v.BOOL,
        False,
        NODES,
        env="pet",
        form="switch",
        help="Run the script with runpy.run_path inside a fresh interpreter.",
    )
    start_method: str = setting(
        v.choice("spawn"),
        "spawn",
        NODES,
        env="pet",
        no_effect="workers are always started as fresh processes",
        help="Accepted for torchrun's sake; only spawn exists.",
    )

    spares: int | None = setting(
        v.optional(v.integer(0, v.MAX_NODES)),
        None,
        SLURM,
        help="Inside Slurm: keep N nodes of the allocation as hot spares (MIN = nodes - N); not with --nnodes.",
    )
    srun_args: tuple[str, ...] = setting(
        v.WORDS,
        (),
        SLURM,
        flag="--srun-arg",
        form="repeat",
        help="One more argument for the srun that nvrx-run starts, as in --srun-arg=--exclusive. May be repeated.",
    )

    rdzv_backend: str = setting(
        v.choice("c10d", "static"),
        "c10d",
        RENDEZVOUS,
        env="pet",
        no_effect="both names mean this package's own coordinator",
        help="c10d or static, for torchrun's sake; both mean the built-in coordinator.",
    )
    rdzv_endpoint: str = setting(
        v.ENDPOINT,
        "",
        RENDEZVOUS,
        env="pet",
        help="Where the coordinator listens. Default: Slurm's first node, else --master-addr and --master-port.",
    )
    rdzv_id: str = setting(
        v.TEXT, "none", RENDEZVOUS, env="pet", help="Name of the job; nodes with another one are refused."
    )
    rdzv_conf: RendezvousConfig = setting(
        v.RDZV_CONF,
        RendezvousConfig(),
        RENDEZVOUS,
        env="pet",
        help="join_timeout=300 (wait for MIN nodes), last_call_timeout=1 (then for spares), "
        "is_host=true|false; read_timeout, close_timeout, timeout, store_connect_wait_seconds and use_libuv are "
        "accepted and change nothing.",
    )
    master_addr: str | None = setting(
        v.optional(v.ADDRESS),
        None,
        RENDEZVOUS,
        env="pet",
        help="Host of the coordinator where --rdzv-endpoint is not given.",
    )
    master_port: int | None = setting(
        v.optional(v.integer(0, 65535, "PORT")),
        None,
        RENDEZVOUS,
        env="pet",
        help="Port of the coordinator where --rdzv-endpoint is not given. Default with --master-addr: 29500.",
    )

    max_restarts: int = setting(
        v.integer(0),
        0,
        RESTARTS,
        env="pet",
        help="How often the workers may be started again, counted for the whole job.",
    )
    workers_stop_timeout: float = setting(
        v.SECONDS, 15.0, RESTARTS, env="pet", help="SIGTERM to SIGKILL when workers are stopped for a restart."
    )
    term_timeout: float = setting(
        v.SECONDS,
        1800.0,
        RESTARTS,
        env="pet",
        help="SIGTERM to SIGKILL when nvrx-run itself was told to end. Inside Slurm, KillWait ends it earlier.",
    )
    monitor_interval: float = setting(
        v.POSITIVE_SECONDS,
        0.3,
        RESTARTS,
        env="pet",
        no_effect="the end of a worker is seen at once, nothing is polled",
        help="Accepted for torchrun's sake; exits are seen at once.",
    )

    log_dir: str = setting(
        v.PATH, "./nvrx_logs", LOGS, env="pet", help="Directory of the log tree, one for all nodes and jobs."
    )
    redirects: Streams = setting(
        v.STREAMS,
        Streams(),
        LOGS,
        env="pet",
        aliases=("-r",),
        help="Streams that go to their log file only: 0 none, 1 stdout, 2 stderr, 3 both; or per local rank: 0:1,1:2.",
    )
    tee: Streams = setting(
        v.STREAMS,
        Streams(),
        LOGS,
        env="pet",
        aliases=("-t",),
        help="Streams that go to their log file and the console, in the numbers of --redirects.",
    )
    local_ranks_filter: tuple[int, ...] | None = setting(
        v.optional(v.RANKS), None, LOGS, env="pet", help="Show only these local ranks on the console. Default: all."
    )

    ft_cfg_path: str | None = setting(
        v.optional(v.PATH),
        None,
        CONFIGURATION,
        env="both",
        aliases=("--fault-tol-cfg-path",),
        help="YAML file with a fault_tolerance: section at any depth; in a task, or without Slurm, also a pipe.",
    )
    ft_ignore_missing_cfg: bool = setting(
        v.BOOL,
        False,
        CONFIGURATION,
        form="switch",
        aliases=("--ignore-missing-fault-tol-cfg",),
        help="Go on with the defaults where that file, or its fault_tolerance: section, is missing.",
    )
    print_config: bool = setting(
        v.BOOL,
        False,
        CONFIGURATION,
        form="switch",
        help="Print every setting with its value and where it came from, and exit.",
    )
    dry_run: bool = setting(
        v.BOOL,
        False,
        CONFIGURATION,
        form="switch",
        help="Print the srun line, the plan and the workers' environment, start nothing, and exit.",
    )

    # Known from torchrun or ft_launcher, refused until they exist.
    logs_specs: str | None = setting(
        v.optional(v.TEXT), None, TORCHRUN, built=False, help="Entry point of a torchrun log plug-in."
    )
    event_log_handler: str = setting(
        v.TEXT, "null", TORCHRUN, env="pet", built=False, help="torchrun's event log handler."
    )
    duplicate_stdout_filters: str | None = setting(
        v.optional(v.TEXT),
        None,
        TORCHRUN,
        env="pet",
        built=False,
        help="torchrun: copy matching stdout lines to one file.",
    )
    duplicate_stderr_filters: str | None = setting(
        v.optional(v.TEXT),
        None,
        TORCHRUN,
        env="pet",
        built=False,
        help="torchrun: copy matching stderr lines to one file.",
    )
    numa_binding: str | None = setting(
        v.optional(v.TEXT), None, TORCHRUN, built=False, help="torchrun's way to bind to NUMA nodes."
    )
    signals_to_handle: str = setting(
        v.TEXT,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        TORCHRUN,
        env="pet",
        built=False,
        help="Signals that torchrun forwards.",
    )
    shutdown_timeout: float | None = setting(
        v.TIMEOUT, None, TORCHRUN, env="pet", built=False, help="torchrun's stop timeout."
    )
    virtual_local_rank: bool = setting(
        v.BOOL, False, TORCHRUN, env="pet", form="switch", built=False, help="torchrun: every worker sees LOCAL_RANK 0."
    )
    gpus_per_numa: int | None = setting(
        v.optional(v.integer(1, 1024)),
        None,
        DEVICES,
        flag="",
        help="GPUs per NUMA node: worker i is bound to NUMA node i // N with numactl.",
    )
    numa_bind: str = setting(
        v.choice("off", "auto"),
        "off",
        DEVICES,
        help="auto: bind each worker with numactl to the NUMA node of its GPU, on the CPUs that Slurm gave; --dry-run "
        "shows where.",
    )
    sysroot: str = setting(
        v.PATH, "/", DEVICES, help="Where the node's /sys is, if not at / (in a container, or a recorded node)."
    )
    node_local_tmpdir: str | None = setting(
        v.optional(v.PATH), None, LOGS, flag="", built=False, help="Node-local log files."
    )
    inject_gpu_failure: frozenset[tuple[int, int]] = setting(
        v.PREFLIGHT_FAILURES,
        frozenset(),
        HEALTH,
        flag="",
        help="CYCLE:INFRA_RANK,...: let the node's check before that cycle fail (for tests).",
    )

    disable_rank_monitors: bool = setting(
        v.BOOL, False, MONITORING, flag="", help="Start no rank monitors: hangs are not noticed."
    )
    enable_multi_launchers_per_node: bool = setting(
        v.BOOL, False, SLURM, flag="", built=False, help="Allow more than one launcher on a node."
    )
    infra_rank_from_nodename: bool = setting(
        v.BOOL, False, SLURM, flag="", built=False, help="Order the nodes by the digits of their Slurm names."
    )
    replacement_group_id: str | None = setting(
        v.optional(v.TEXT), None, SLURM, flag="", built=False, help="Group of nodes that are replaced together."
    )

    def node_range(self, slurm_nodes: int | None = None) -> NodeRange:
        """How many nodes train (`min`) and may take part (`max`).

        `slurm_nodes`: nodes of the allocation (>= 1), None outside Slurm. Raises UsageError for too many spares.
        """
        if self.nnodes is not None:
            return self.nnodes
        spares = self.spares or 0
        if slurm_nodes is None and spares:
            raise UsageError(
                "--spares counts nodes of a Slurm allocation and there is none here; give --nnodes MIN:MAX instead"
            )
        if spares >= (slurm_nodes or 1):
            raise UsageError(
                f"--spares {spares} leaves no node to train on: the allocation has {slurm_nodes}; keep fewer spares"
            )
        return NodeRange((slurm_nodes or 1) - spares, slurm_nodes or 1)

    def check_local_ranks(self, nproc: int) -> None:
        """Raises UsageError if a local rank is to be shown that `nproc` workers per node do not have."""
        last = max(self.local_ranks_filter or (0,))
        if last >= nproc:
            have = f"local ranks 0 to {nproc - 1}" if nproc > 1 else "local rank 0 only"
            raise UsageError(
                f"--local-ranks-filter names local rank {last} but a node has {have};"
                " correct it, or give a larger --nproc-per-node"
            )

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """(host, port) of the coordinator as the user gave it; None: Slurm or --standalone decides; port 0: any."""
        if self.standalone:
            return None
        if self.rdzv_endpoint:
            return v.split_endpoint(self.rdzv_endpoint)
        if self.master_addr is None:
            return None
        return self.master_addr, 29500 if self.master_port is None else self.master_port


def contradictions(launch: LaunchConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (is it so?, the sentence about it)."""
    nodes = launch.nnodes
    if nodes is not None:
        yield launch.spares is not None, "--spares and --nnodes say the same in two ways; give only one of them"
        yield (
            (launch.node_rank or 0) >= nodes.max,
            (f"--node-rank {launch.node_rank} is not a place among --nnodes {nodes}; give 0 to {nodes.max - 1}"),
        )
        yield (
            launch.standalone and nodes.max > 1,
            f"--standalone is one node, --nnodes {nodes} is more; remove one of them",
        )
    yield launch.standalone and bool(launch.spares), "--standalone is one node and has no --spares; remove one of them"
    yield (
        launch.standalone and bool(launch.node_rank),
        "--standalone is one node, so --node-rank can only be 0; remove one of them",
    )
    yield launch.no_python and launch.module, "--no-python and --module exclude each other; remove one of them"
    yield launch.no_python and launch.run_path, "--no-python and --run-path exclude each other; remove one of them"
    yield launch.module and launch.run_path, "--module and --run-path exclude each other; remove one of them"
