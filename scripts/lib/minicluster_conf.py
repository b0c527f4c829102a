"""What the minicluster's Slurm is told: settings, private ports, and the text of slurm.conf."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass

import slurm_builds

from nvrx_slurm.errors import UsageError

MAX_NODES = 64
_MAX_SOCKET_PATH = 107  # sun_path of unix(7) holds 108 bytes with the closing NUL
_LONGEST_SOCKET = "spool/n64/n64_4294967295.4294967295"  # slurmstepd's socket: SPOOL/NODE_JOB.STEP
_PORTS = range(10000, 20000)  # below the ephemeral ports, beside the coordinator's 20000..29999
DEVICES = 4  # of each node, by the variants with GPUs
# What real clusters differ in: lines of slurm.conf each, of which the last one of a key counts.
VARIANTS: dict[str, tuple[str, ...]] = {
    "affinity": ("TaskPlugin=task/affinity",),
    "memory": ("SelectTypeParameters=CR_CPU_Memory", "NodeName=DEFAULT RealMemory=8000"),
    "gpus": ("GresTypes=gpu", f"NodeName=DEFAULT Gres=gpu:a100:{DEVICES}"),
    "amd-gpus": ("GresTypes=gpu", f"NodeName=DEFAULT Gres=gpu:mi250:{DEVICES}"),
    "intel-gpus": ("GresTypes=gpu", f"NodeName=DEFAULT Gres=gpu:max1550:{DEVICES}"),
    # heterogeneous jobs need it
    "backfill": (
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
    ),
    "interactive": ("LaunchParameters=use_interactive_step",),
    # a job of the partition main takes the nodes of jobs in the others, at once or after a minute
    "preemption": (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        *(
            f"PartitionName={mode}-{grace_s} Nodes=ALL PreemptMode={mode} GraceTime={grace_s} PriorityTier=1"
            for mode in ("requeue", "cancel")
            for grace_s in (0, 10)
        ),
        "PartitionName=DEFAULT GraceTime=0 PreemptMode=OFF PriorityTier=9",
    ),
    "dots": (),  # in the names of nodes
    "names": (),  # of nodes resolve, by an /etc/hosts that each node has; needs root
    "cgroup": ("ProctrackType=proctrack/cgroup",),  # needs a machine on which root may make cgroups
}
_GRES_FLAGS = {
    "gpus": "Type=a100 Flags=nvidia_gpu_env",
    "amd-gpus": "Type=mi250 Flags=amd_gpu_env",
    "intel-gpus": "Type=max1550 Flags=intel_gpu_env",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The shape and patience of a minicluster.

    nodes: 1..64, named n1..nN, with the variant "dots" n1.mini. cpus_per_node: CPUs that Slurm believes each node
    has, 1..1024 (the real ones are shared by all). kill_wait_s: slurm.conf's KillWait, seconds from SIGTERM to
    SIGKILL, 1..65533.
    extra: lines appended to slurm.conf, for tests of special settings. slurm: "" for Debian's, else a version.
    variants: names in VARIANTS.
    """

    nodes: int = 4
    cpus_per_node: int = 16
    kill_wait_s: int = 30
    extra: tuple[str, ...] = ()
    slurm: str = ""
    variants: tuple[str, ...] = ()

    def __post_init__(self):
        if unknown := set(self.variants) - set(VARIANTS):
            raise UsageError(f"minicluster: no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}.")
        for name, value, low, high in (
            ("nodes", self.nodes, 1, MAX_NODES),
            ("cpus_per_node", self.cpus_per_node, 1, 1024),
            ("kill_wait_s", self.kill_wait_s, 1, 65533),
        ):
            if not low <= value <= high:
                raise UsageError(f"minicluster: {name}={value} is out of range; use {low}..{high}.")

    @property
    def node_names(self):
        """n1..nN."""
        domain = ".mini" if "dots" in self.variants else ""
        return [f"n{i}{domain}" for i in range(1, self.nodes + 1)]


def check_root(root):
    """UsageError when paths below `root` are too long for Unix sockets (107 bytes, unix(7)) or break slurm.conf."""
    longest = len(str(root / _LONGEST_SOCKET).encode())
    if longest > _MAX_SOCKET_PATH:
        room = _MAX_SOCKET_PATH - len(_LONGEST_SOCKET) - 1
        raise UsageError(f"minicluster: the directory {root} is too long for Unix sockets; use one of <= {room} bytes.")
    if any(c.isspace() or c in "#%=,\"'" for c in str(root)):
        raise UsageError(f"minicluster: the directory {root} has a character that slurm.conf cannot hold; use another.")


def free_ports(count):
    """`count` distinct TCP ports that were free on loopback a moment ago; random, so that two clusters differ."""
    chosen: list[int] = []
    held: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(_PORTS, k=min(len(_PORTS), 100 + 10 * count)):
            probe = socket.socket()
            held.append(probe)  # all stay bound until all are chosen
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    finally:
        for probe in held:
            probe.close()
    raise UsageError(f"minicluster: no {count} free ports in {_PORTS.start}..{_PORTS.stop - 1}; end other programs.")


def render_slurm_conf(root, settings, ports, user, host):
    """Text of slurm.conf(5) for Slurm 22.05 and later.

    ports: [slurmctld, n1, n2, ...]. user: name that all daemons run as. host: this machine's short host name
    (slurmctld insists on finding it in SlurmctldHost).
    """
    names = ",".join(settings.node_names)
    node_ports = ",".join(str(p) for p in ports[1:])
    lines = [
        "# Written by scripts/minicluster; a pretended cluster, all of it on this machine.",
        "ClusterName=mini",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",  # listen on NodeAddr, that is on loopback only
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={root}/munge/s",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/run/slurmctld.pid",
        f"SlurmdPidFile={root}/run/%n.pid",
        f"SlurmctldLogFile={root}/log/slurmctld.log",
        f"SlurmdLogFile={root}/log/slurmd-%n.log",
        # No cgroups, no affinity, no accounting: what works on any machine and touches nothing outside `root`.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "MpiDefault=none",
        "MailProg=/bin/true",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",  # believe CPUs= below, not the machine
        # A test waits for jobs to start: schedule at once.
        "SchedulerType=sched/builtin",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0",
        f"KillWait={settings.kill_wait_s}",
        # The default: in these five minutes Slurm itself knows nothing of a dead node, as on real clusters.
        "SlurmdTimeout=300",
        "ReturnToService=2",
        *(line for variant in settings.variants for line in VARIANTS[variant]),
        f"NodeName={names} NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_ports} CPUs={settings.cpus_per_node}",
        f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
        *([f"PluginDir={slurm_builds.prefix(settings.slurm)}/plugins"] if settings.slurm else []),
        *settings.extra,
    ]
    return "\n".join(lines) + "\n"


def render_gres_conf(settings, device):
    """Text of gres.conf(5): `device`, any character device, stands for each GPU. Slurm tells jobs their numbers."""
    kinds = [_GRES_FLAGS[variant] for variant in settings.variants if variant in _GRES_FLAGS]
    return "".join(f"Name=gpu {kind} File={device}[0-{DEVICES - 1}]\n" for kind in kinds)
