"""Settings of the launcher: torchrun's flags and those of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.settings import MONITORING, Section, ignored, maybe, setting, switch
from nvrx_slurm.config.values import NodeRange, RendezvousConfig, Streams
from nvrx_slurm.errors import UsageError


@dataclass(frozen=True)
class LaunchConfig(Section):
    """What to start, where and how. Times in seconds. Flags and environment only, never YAML."""

    section: ClassVar[str] = "launch"

    nnodes: NodeRange | None = maybe(
        v.NNODES, begins="Nodes and workers", env="pet",
        help="MIN nodes train, the others are hot spares. Default: the Slurm allocation less --spares; else 1.",
    )  # fmt: skip
    nproc_per_node: int | str | None = maybe(
        v.NPROC, "Workers per node. Default: the GPUs that Slurm gave the node, else 1.", env="pet"
    )
    node_rank: int | None = maybe(
        k.integer(0, v.MAX_NODES),
        "Place of this node among the nodes, from 0. Default: Slurm's order.",
        env="pet",
    )
    local_addr: str | None = maybe(
        k.ADDRESS,
        "Name or address under which other nodes reach this one. Default: Slurm's node address.",
        env="pet",
    )
    standalone: bool = switch(
        "One node, right here, no rendezvous with others (also on a login node).", env="pet"
    )
    role: str = setting(k.TEXT, "default", "ROLE_NAME of the workers.", env="pet")
    module: bool = switch(
        "The script is a Python module: run it as python -m does.", env="pet", aliases=("-m",)
    )
    no_python: bool = switch(
        "The script is a program of its own: start it without Python.", env="pet"
    )
    run_path: bool = switch(
        "Run the script with runpy.run_path inside a fresh interpreter.", env="pet"
    )
    compat: bool = switch(
        flag="--nvrx-compat",
        help="Workers that import nvidia_resiliency_ext get the modules of nvrx_slurm, even where NVRx is installed.",
    )  # fmt: skip
    start_method: str = ignored(
        k.choice("spawn"), "spawn", "--ft-warm says how workers are started", env="pet"
    )

    spares: int | None = maybe(
        k.integer(0, v.MAX_NODES), begins="Slurm",
        help="Keep N nodes as hot spares: of the Slurm allocation, or beyond MIN of --nnodes.",
    )  # fmt: skip
    srun_args: tuple[str, ...] = setting(
        k.WORDS, (), flag="--srun-arg", form="repeat",
        help="One more argument for the srun that nvrx-run starts: --srun-arg=--exclusive. May be repeated.",
    )  # fmt: skip
    slurm_api: str = setting(
        k.choice("auto", "cli", "pyslurm"), "auto",
        help="How Slurm is asked: by its tools (cli), by pyslurm, or (auto) by pyslurm where it fits the cluster.",
    )  # fmt: skip
    step_prefix: tuple[str, ...] = setting(
        k.WORDS, (), form="repeat",
        help="One more word before nvrx-run in the tasks: --step-prefix=apptainer --step-prefix=exec ... May be "
        "repeated.",
    )  # fmt: skip
    until_done: bool = switch(
        "Requeue the Slurm job until the training has ended: not after 0, 2, 93 or a signal."
    )
    chain_failures: int = setting(
        k.integer(1),
        3,
        "This many failures within --chain-failure-window end --until-done and a chain.",
    )
    chain_failure_window: float = setting(k.POSITIVE_SECONDS, 3600.0, "See --chain-failures.")
    chain_links: str | None = maybe(
        k.PATH, "File with the ids of the jobs of a chain; nvrx submit sets it.", flag=""
    )
    enable_multi_launchers_per_node: bool = setting(
        k.BOOL, False, flag="",
        help="A step may have several tasks per node, each an agent with its own workers; --nnodes counts agents then.",
    )  # fmt: skip
    infra_rank_from_nodename: str | None = maybe(
        k.TEXT,
        "If it is set: group ranks are given in the order of the digits in node names.",
        flag="",
    )
    replacement_group_id: str | None = maybe(
        k.TEXT, flag="",
        help="With --ft-segment: the group, such as a task of a job array, in which this node's segment lies.",
    )  # fmt: skip

    rdzv_backend: str = ignored(
        k.choice("c10d", "static"), "c10d", begins="Rendezvous", env="pet",
        why="both names mean this package's own coordinator",
    )  # fmt: skip
    rdzv_endpoint: str = setting(
        v.ENDPOINTS, "", env="pet",
        help="Where the first coordinator listens, then further nodes that may coordinate. Default: the nodes of the "
        "Slurm job, else --master-addr and --master-port.",
    )  # fmt: skip
    rdzv_id: str = setting(
        k.TEXT, "none", "Name of the job; nodes with another one are refused.", env="pet"
    )
    rdzv_conf: RendezvousConfig = setting(
        v.RDZV_CONF, RendezvousConfig(), env="pet",
        help="join_timeout=300 (wait for MIN nodes; timeout=N is its default), last_call_timeout=1 (then for spares), "
        "is_host=true|false. Other keys of torchrun change nothing.",
    )  # fmt: skip
    master_addr: str | None = maybe(
        k.ADDRESS, "Host of the coordinator where --rdzv-endpoint is not given.", env="pet"
    )
    master_port: int | None = maybe(
        k.integer(0, 65535, "PORT"), env="pet",
        help="Port of the coordinator where --rdzv-endpoint is not given. Default with --master-addr: 29500.",
    )  # fmt: skip

    max_restarts: int = setting(
        k.integer(0), 0, begins="Restarts and stopping", env="pet",
        help="How often the workers may be started again, counted for the whole job.",
    )  # fmt: skip
    workers_stop_timeout: float = setting(
        k.SECONDS, 15.0, env="pet",
        help="SIGTERM to SIGKILL when workers are stopped for a restart; see also --ft-stop-idle-timeout.",
    )  # fmt: skip
    term_timeout: float = setting(
        k.SECONDS, 1800.0, env="pet",
        help="SIGTERM to SIGKILL when nvrx-run is told to end. Inside Slurm, KillWait ends it earlier.",
    )  # fmt: skip
    monitor_interval: float = ignored(
        k.POSITIVE_SECONDS, 0.3, "the end of a worker is seen at once", env="pet"
    )

    disable_rank_monitors: bool = setting(
        k.BOOL, False, begins=MONITORING, flag="",
        help="No rank monitors, RankMonitorClient does nothing (also without a launcher): hangs are not noticed.",
    )  # fmt: skip

    inject_gpu_failure: frozenset[tuple[int, int]] = setting(
        v.PREFLIGHT_FAILURES, frozenset(), begins="Health checks", flag="",
        help="CYCLE:INFRA_RANK,...: let the node's check before that cycle fail (for tests).",
    )  # fmt: skip

    gpus_per_numa: int | None = maybe(
        k.integer(1, 1024), begins="GPUs and NUMA", flag="",
        help="GPUs per NUMA node: worker i is bound to NUMA node i // N with numactl.",
    )  # fmt: skip
    numa_bind: str = setting(
        k.choice("off", "auto"), "off",
        help="auto: bind each worker with numactl to the NUMA node of its GPU; --dry-run shows where.",
    )  # fmt: skip
    sysroot: str = setting(
        k.PATH, "/", "Where the node's /sys is, if not at / (in a container, or a recorded node)."
    )

    log_dir: str = setting(
        k.PATH,
        "./nvrx_logs",
        "Directory of the log tree, one for all nodes and jobs.",
        begins="Logs",
        env="pet",
    )
    redirects: Streams = setting(
        v.STREAMS, Streams(), env="pet", aliases=("-r", "--redirect"),
        help="Streams that go to their log file only: 0 none, 1 stdout, 2 stderr, 3 both; per local rank: 0:1,1:2.",
    )  # fmt: skip
    tee: Streams = setting(
        v.STREAMS, Streams(), env="pet", aliases=("-t",),
        help="Streams that go to their log file and the console, in the numbers of --redirects.",
    )  # fmt: skip
    local_ranks_filter: tuple[int, ...] = setting(
        v.RANKS, (), "Show only these local ranks on the console. Default: all.", env="pet"
    )
    console_prefix: str = setting(
        k.choice("rank", "none"),
        "rank",
        "What stands before the lines of a rank on the console: [rank N], or nothing.",
    )
    logs_specs: str = ignored(
        k.choice("default"), "default", "--redirects, --tee and --local-ranks-filter say it"
    )

    ft_cfg_path: str | None = maybe(
        k.PATH, begins="Configuration and dry runs", env="both", aliases=("--fault-tol-cfg-path",),
        help="YAML file with a fault_tolerance: section at any depth.",
    )  # fmt: skip
    ft_ignore_missing_cfg: bool = switch(
        aliases=("--ignore-missing-fault-tol-cfg",),
        help="Go on with the defaults where the file of --ft-cfg-path, or its fault_tolerance: section, is missing.",
    )  # fmt: skip
    print_config: bool = switch(
        "Print every setting with its value and where it came from, and exit."
    )
    dry_run: bool = switch(
        "Print the srun line, the plan and the workers' environment, and exit. On a login node: as in an allocation."
    )

    def node_range(self, slurm_nodes: int | None = None) -> NodeRange:
        """How many nodes train (`min`) and may take part (`max`).

        `slurm_nodes`: nodes of the allocation (>= 1), None outside Slurm. Raises UsageError for too many spares.
        """
        spares = self.spares or 0
        have = slurm_nodes or 1
        if self.nnodes is not None:
            return NodeRange(self.nnodes.min, max(self.nnodes.max, self.nnodes.min + spares))
        if spares >= have:
            where = (
                "the allocation has"
                if slurm_nodes
                else "without --nnodes or a Slurm allocation there is"
            )
            raise UsageError(
                f"--spares {spares} leaves no node to train on: {where} {have}; keep fewer spares"
            )
        return NodeRange(have - spares, have)

    def check_local_ranks(self, nproc: int) -> None:
        """Raises UsageError if a local rank is to be shown that `nproc` workers per node do not have."""
        last = max(self.local_ranks_filter or (0,))
        if last >= nproc:
            raise UsageError(
                f"--local-ranks-filter names local rank {last} but a node has {nproc} workers; correct it"
            )

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of the first coordinator and of further ones, as given; (): Slurm or --standalone decides."""
        if self.standalone:
            return ()
        if self.rdzv_endpoint:
            return v.split_endpoints(self.rdzv_endpoint)
        if self.master_addr is None:
            return ()
        return ((self.master_addr, 29500 if self.master_port is None else self.master_port),)

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """The first of `endpoints`, or None; port 0: any."""
        return next(iter(self.endpoints), None)

    def check(self) -> None:
        """Raises UsageError where settings contradict each other."""
        nodes, more = self.nnodes, bool(self.spares or self.node_rank)
        if nodes is not None:
            more |= nodes.max > 1
            if self.spares is not None and nodes.max not in (nodes.min, nodes.min + self.spares):
                raise UsageError(
                    f"--spares {self.spares} contradicts --nnodes {nodes}; give --nnodes {nodes.min}"
                )
            if (self.node_rank or 0) >= nodes.max:
                raise UsageError(
                    f"--node-rank {self.node_rank} is not a place among --nnodes {nodes}; give 0 or more"
                )
        if self.standalone and more:
            raise UsageError("--standalone is one node; remove --nnodes, --spares and --node-rank")
        if self.no_python + self.module + self.run_path > 1:
            raise UsageError(
                "--no-python, --module and --run-path exclude each other; keep one of them"
            )
        if isinstance(self.nproc_per_node, int):
            self.check_local_ranks(self.nproc_per_node)
