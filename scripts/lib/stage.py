"""Where the demo plays: four nodes of a private Slurm cluster, or four agents that are started by hand.

Both run the same training through `nvrx-run`, both can lose a node for certain, and of both nothing is left after
`close`. The processes of a node are a tree below an init of its own (see `minicluster_init`).
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import final

import minicluster_init as init
from minicluster import MiniCluster, MiniClusterError

NODES, SPARES, RANKS_PER_NODE = 4, 2, 2
WORLD_SIZE = (NODES - SPARES) * RANKS_PER_NODE
HANG_TIMEOUT_S = 3
_SECTIONS = f"setup:60,step:{HANG_TIMEOUT_S},checkpointing:10"  # of examples/ddp_sections.py
_MAX_RESTARTS = 10
_SUBMIT_S = 30.0


@final
class SlurmStage:
    """A minicluster below `root`; jobs go through nvrx submit, one after the other."""

    title = f"a Slurm cluster of {NODES} nodes on this machine"

    def __init__(self, root):
        self._cluster = MiniCluster(root, NODES, die_with_owner=True)
        self._job = 0
        self._lost: list[str] = []

    def open(self):
        """Bring the cluster up."""
        self._cluster.up()

    def start(self, directory, script):
        """Start a job with its files in `directory`; returns what was started. `script`: the script and its words."""
        settings = {
            "--nodes": NODES,
            "--spares": SPARES,
            "--nproc-per-node": RANKS_PER_NODE,
            "--max-restarts": _MAX_RESTARTS,
            "--ft-rank-section-timeouts": _SECTIONS,
            "--ft-rank-out-of-section-timeout": 60,
            "--ft-checkpoint-dir": directory / "checkpoints",
            "--log-dir": directory / "logs",
            "--output": directory / "job-%j.out",
            "--sbatch-arg": f"--chdir={directory}",
        }
        words = ["submit", *(f"{flag}={value}" for flag, value in settings.items()), *script]
        out = self._cluster.run(sys.executable, "-m", "nvrx_slurm.cli.toolbox", *words, timeout_s=_SUBMIT_S)
        self._job = int(out.split()[2].rstrip(":"))
        return f"nvrx {' '.join(words)}\n{out.strip()}"

    def ended(self):
        """As Slurm says."""
        return self._cluster.job(self._job)["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING")

    def lose_node(self, infra_rank):
        """Kill slurmd, slurmstepds and tasks of the node."""
        name = self._cluster.settings.node_names[infra_rank]
        self._cluster.kill_node(name)
        self._lost.append(name)
        return name

    def wait(self, timeout_s):
        """Slurm calls a job with a lost node "completing" until that node is back, or set to DOWN."""
        self._cluster.wait_job(self._job, timeout_s, until="COMPLETING")
        for name in self._lost:
            self._cluster.restart_node(name)
        self._lost = []
        end = self._cluster.wait_job(self._job, 30)
        code = 128 + end.signal if end.signal else end.exit_code
        if end.state != "COMPLETED":
            code = code or 1  # a cancelled job has exit code 0
        return code, f"Slurm says {end.state}, exit code {code}"

    def close(self):
        """End the cluster, at any time; processes that were not below any of its nodes would be a defect."""
        stray = self._cluster.down()
        if stray:
            raise MiniClusterError(f"these were not below any node of the cluster: {stray}")


@final
class LocalStage:
    """Four agents on loopback that find each other by --rdzv-endpoint, as without any scheduler."""

    title = f"{NODES} nvrx-run agents on this machine, without Slurm"

    def __init__(self, root):
        self._root = root
        self._lifeline: tuple[int, int] | None = None
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}  # inits by infra rank
        self._runs = 0

    def open(self):
        """Nothing to bring up but the pipe by which everything dies with us."""
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._lifeline = os.pipe()

    def start(self, directory, script):
        """Start the agents."""
        self._runs += 1
        logs = directory / "logs"
        argv = [
            sys.executable, "-m", "nvrx_slurm.cli.run", f"--nnodes={NODES - SPARES}:{NODES}",
            f"--nproc-per-node={RANKS_PER_NODE}", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
            f"--rdzv-id=run{self._runs}", f"--max-restarts={_MAX_RESTARTS}", f"--log-dir={logs}",
            f"--ft-rank-section-timeouts={_SECTIONS}",
            "--ft-rank-out-of-section-timeout=60",
        ]  # fmt: skip
        (directory / "agents").mkdir()
        for infra_rank in range(NODES):
            self._start_node(infra_rank, directory, [*argv, f"--node-rank={infra_rank}", *script])
        return f"{NODES} x {' '.join(['nvrx-run', *argv[3:], '--node-rank=I', *script])}"

    def ended(self):
        """When the first agent has left."""
        return any(node.poll() is not None for node in self._nodes.values())

    def lose_node(self, infra_rank):
        """Kill the agent's whole tree."""
        node = self._nodes.pop(infra_rank)
        init.kill_tree(node.pid)
        node.wait(10)
        return f"node {infra_rank}"

    def wait(self, timeout_s):
        """Wait for the agents; they all end with the same code."""
        deadline = time.monotonic() + timeout_s
        codes = {i: node.wait(max(0.1, deadline - time.monotonic())) for i, node in self._nodes.items()}
        self._nodes = {}
        return max(codes.values()), f"{len(codes)} agents ended with {sorted(set(codes.values()))}"

    def close(self):
        """Kill what runs."""
        for node in self._nodes.values():
            node.send_signal(signal.SIGTERM)
            node.wait(10)
        self._nodes = {}
        if self._lifeline is not None:
            os.close(self._lifeline[1])
            os.close(self._lifeline[0])
            self._lifeline = None

    def _start_node(self, infra_rank, directory, command):
        assert self._lifeline is not None, "open() first"
        lifeline = self._lifeline[0]
        argv = [sys.executable, "-I", "-S", init.__file__, str(lifeline), *command]
        with open(directory / "agents" / f"agent_{infra_rank}.log", "ab") as log:
            self._nodes[infra_rank] = subprocess.Popen(
                argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                pass_fds=[lifeline],
            )  # fmt: skip


def make_stage(root, want_slurm):
    """The best stage that this machine has, and the sentence that says why it is not a Slurm cluster (else None)."""
    why = MiniCluster.available() if want_slurm else "--no-slurm was given."
    return (LocalStage(root), why) if why else (SlurmStage(root), None)


def running_with(text):
    """Living processes, this one left out, that have `text` in their command line or environment."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            seen = Path("/proc", entry, "cmdline").read_bytes() + Path("/proc", entry, "environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        if text.encode() in seen and int(entry) != os.getpid() and (one := init.process(int(entry))):
            found.append(one)
    return found


def await_end(processes, timeout_s):
    """Wait until these have ended; returns those that have not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    for one in processes:
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            continue
        select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        os.close(fd)
    return [one for one in processes if init.process(one.pid) == one]


def free_port():
    """A port below those that the kernel gives away: no agent that listens on any port takes it meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, max(first, 12_000)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports were tried, and none is free")
