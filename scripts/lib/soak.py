"""`scripts/dev/soak`: random faults on a real private Slurm cluster for minutes or hours, and a judge of everything.

    scripts/dev/soak --minutes 10 --seed 7

One job after the other, each with warm standbys, checkpoints in memory, merged logs, status, a metrics file and a
collector that never answers; every few seconds a fault. The judge: no rank runs twice, no line is lost or repeated, the
state is the one of a run without faults, no more steps are lost than two saves into memory unless a line says why, the
account sums up, no counter goes back, nothing grows, nothing is left. Ends with 1 at a finding, and keeps the evidence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import minicluster_init as init
from minicluster import MiniCluster
from soak_states import States
from stage import await_end, running_with

from nvrx_slurm.core.logs.lines import rank_prefix
from nvrx_slurm.errors import NvrxError

NODES, LEAST, RANKS = 4, 3, 2
_WORLD = LEAST * RANKS
_WORKER = Path(__file__).with_name("soak_worker.py")
_JOB_S = 240.0  # of faults in one job; a lost node comes back between two
_RECOVERY_S = 240.0
_REST_S = 2.0  # less than a rank may be silent
_KEEPER_S = 60.0  # an agent that was killed leaves its keeper for 30 s
_STEPS = 5  # that every rank does after a fault before the next
_GROWN_MB, _GROWN_FDS = 12.0, 12  # that an agent may gain from its third fault to its last
_YOUNG_S = 12.0  # a helper that dies younger again and again is started again later and later: lines wait for long
_GROWN_PROCESSES = 4 * NODES  # that the job may gain from its third fault to its last: standbys are made meanwhile
_FLAGS = (
    "--ft-rank-heartbeat-timeout=5", "--ft-initial-rank-heartbeat-timeout=60", "--max-restarts=1000",
    "--ft-rank-section-timeouts=checkpointing:30", "--ft-stop-idle-timeout=0.3", "--ft-crash-loop-backoff=0",
    "--ft-preload=torch,torch.distributed", "--ft-checkpoint-interface=lo",
    f"--nnodes={LEAST}:{NODES}", f"--nproc-per-node={RANKS}",
)  # fmt: skip
_ROLES = {
    "agent": "nvrx_slurm.cli.run", "monitor": "nvrx_slurm.monitor.main", "template": "nvrx-template",
    "standby": "nvrx-standby", "keeper": "nvrx_slurm.checkpoint.keeper",
    "shipper": "nvrx_slurm.logs.shipper", "aggregator": "nvrx_slurm.logs.aggregator",
}  # fmt: skip


@dataclass
class Soak:
    """The cluster, what was done to it, and what the judge has found."""

    root: Path
    rng: random.Random
    job_s: float = _JOB_S
    cluster: MiniCluster = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    jobs: int = 0
    began_s: float = field(default_factory=time.monotonic)
    collector: socket.socket = field(init=False)  # accepts, and never answers
    states: States = field(default_factory=lambda: States(_WORLD))

    def __post_init__(self):
        self.cluster = MiniCluster(self.root / "c", NODES, die_with_owner=True)
        self.collector = socket.create_server(("127.0.0.1", 0), backlog=1000)

    def say(self, text):
        """One line with the time."""
        print(f"{time.monotonic() - self.began_s:8.1f} s  {text}", flush=True)

    def find(self, what):
        """Something is wrong."""
        self.findings.append(what)
        self.say(f"FINDING  {what}")

    def run(self, seconds):
        """Jobs until the time is over, or something is found."""
        self.cluster.up()
        until_s = time.monotonic() + seconds
        shared = set(os.listdir("/dev/shm"))
        while time.monotonic() < until_s and not self.findings:
            self.jobs += 1
            Job(self, self.root / f"job{self.jobs}").run(min(until_s, time.monotonic() + self.job_s))
            if left := {name for name in os.listdir("/dev/shm") if "nvrx" in name} - shared:
                self.find(f"left in /dev/shm: {sorted(left)[:5]}")


class Job:
    """One job of the soak."""

    def __init__(self, soak, place):
        self.soak, self.place, self.rng = soak, place, soak.rng
        place.mkdir()
        self.pids: dict[int, int] = {}
        self.lost = ""  # the node that is lost
        self.hurt = set[str]()  # cycles and nodes whose shippers may not have sent everything
        # (agent, whether it has ranks) -> (MB, its files) after each fault; a spare that is promoted holds more
        self.usage: dict[tuple[int, bool], list[tuple[float, Counter[str]]]] = {}
        self.processes_seen: list[int] = []  # of the job, after each fault
        self.counters: dict[str, float] = {}  # series of the metrics file -> its last value
        self.restarts = 0  # that the faults must have led to
        self.raised = False  # an exception was the last fault of a rank
        self.id = 0

    def run(self, until_s):
        """Submit, strike until the time is over, end, judge."""
        nvrx_run = Path(sys.executable).with_name("nvrx-run")
        words = [str(nvrx_run), *_FLAGS, f"--log-dir={self.place}/logs",
                 f"--ft-per-cycle-applog-prefix={self.place}/train.log",
                 f"--ft-metrics-file={self.place}/metrics.prom", str(_WORKER), str(self.place)]  # fmt: skip
        script, port = self.place / "job.sh", self.soak.collector.getsockname()[1]
        script.write_text(
            f"#!/bin/bash\nexport OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port}\nexec {' '.join(words)}\n"
        )
        self.id = self.soak.cluster.submit(script, f"--nodes={NODES}", "--exclusive", "--no-kill",
                                           f"--chdir={self.place}", f"--output={self.place}/job.out")  # fmt: skip
        self._await_training("the start")
        faults = 0
        while time.monotonic() < until_s and not self.soak.findings:
            kind = self.rng.choice([*FAULTS])
            what = FAULTS[kind](self)
            if what is None:
                continue
            self.soak.counts[kind] += 1
            faults += 1
            self.soak.say(f"{kind:18} {what}")
            self._await_training(kind)
            self._measure()
            if not any(self.place.glob("logs/*/r*/status.json")):
                self.soak.find("there is no status.json")
            self._read_metrics()
        (self.place / "stop").touch()
        self._end()
        self._judge()

    # --- what is seen -------------------------------------------------------------------------------------------

    def progress(self):
        """Rank -> steps in this life, pid, cycle."""
        found = {}
        for rank in range(_WORLD):
            try:
                steps, pid, cycle = json.loads((self.place / f"progress.{rank}").read_text())
            except (FileNotFoundError, ValueError):
                continue
            found[rank] = steps, pid, cycle
        return found

    def _await_training(self, after):
        deadline_s = time.monotonic() + _RECOVERY_S
        before = self.progress()
        while time.monotonic() < deadline_s:
            now = self.progress()
            alive = all(init.process(pid) for _, pid, _ in now.values())
            same = len({cycle for *_, cycle in now.values()}) == 1
            on = all(now[r][1] != before[r][1] or now[r][0] >= before[r][0] + _STEPS for r in now if r in before)
            if len(now) == _WORLD and alive and same and on and all(one[0] >= _STEPS for one in now.values()):
                self.pids = {rank: pid for rank, (_, pid, _) in now.items()}
                return
            time.sleep(0.1)
        self.soak.find(f"after {after} the ranks do not all train within {_RECOVERY_S:g} s: {self.progress()}")

    def processes(self, role):
        """Of this job, oldest first."""
        found, scan = [], self.soak.cluster.scan
        if role == "keeper":  # it has little of the environment
            scan = partial(running_with, str(self.soak.root))
        for one in scan():
            try:
                words = Path(f"/proc/{one.pid}/cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            agent = role == "agent" and "bin/nvrx-run" in words and f"{self.place}/logs" in words
            if (agent and self._node(one.pid)) or (role != "agent" and _ROLES[role] in words):
                found.append(one)
        return sorted(found, key=lambda one: one.pid)

    def _node(self, pid):
        """The node of a process of the step; "" for the front in the batch script."""
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return ""
        names = [word.partition(b"=")[2].decode() for word in words if word.startswith(b"SLURMD_NODENAME=")]
        in_step = any(word.startswith(b"SLURM_STEP_ID=") for word in words)  # SLURM_PROCID is in a batch script, too
        return names[0] if names and in_step else ""

    def _measure(self):
        for one in self.processes("agent"):
            try:
                pages = int(Path(f"/proc/{one.pid}/statm").read_text().split()[1])
                files = Counter(_kinds_of_files(Path(f"/proc/{one.pid}/fd")))
            except OSError:
                continue
            has_ranks = any("/rank_#" in kind for kind in files)
            self.usage.setdefault((one.pid, has_ranks), []).append((pages * 4096 / 1e6, files))
        self.processes_seen.append(len(self.soak.cluster.scan()))

    def _read_metrics(self):
        """No counter of the metrics file goes back, also after a takeover."""
        try:
            lines = (self.place / "metrics.prom").read_text().splitlines()
        except FileNotFoundError:
            return  # a coordinator that resigns removes it: all nodes share one path here
        for line in lines:
            series, _, value = line.rpartition(" ")
            if line.startswith("#") or not series.partition("{")[0].endswith("_total"):
                continue
            if float(value) < self.counters.get(series, 0.0):
                self.soak.find(f"counter {series} went from {self.counters[series]} to {value}")
            self.counters[series] = float(value)

    # --- the end ------------------------------------------------------------------------------------------------

    def _end(self):
        cluster = self.soak.cluster
        cluster.wait_job(self.id, _RECOVERY_S, until="COMPLETING")
        if self.lost:
            cluster.restart_node(self.lost)
        end = cluster.wait_job(self.id, _RECOVERY_S)
        left = await_end(running_with(str(self.place)), 5.0)
        left += await_end(self.processes("keeper"), _KEEPER_S)
        if left:
            self.soak.find(f"job {self.id} has ended, but these run on: {left[:5]}")
        if end.exit_code or end.signal:
            self.soak.find(f"job {self.id} ended {end.state} with {end.exit_code}:{end.signal}")

    def _judge(self):
        runs = [*self.place.glob("logs/*/r0")]
        findings = [*self._twice(), *self._account(runs[0]), *self._lines(runs[0]), *self._growth()]
        findings += self.soak.states.findings(runs[0], (self.place / "job.out").read_text())
        for what in findings:
            self.soak.find(f"job {self.id}: {what}")
        self.soak.say(f"job {self.id} is judged: {len(findings)} findings, {self.restarts} faults of ranks or nodes")

    def _twice(self):
        yield from (path.read_text() for path in self.place.glob("twice.*"))

    def _account(self, run):
        try:
            result: dict[str, Any] = json.loads((run / "result.json").read_text())
        except (OSError, ValueError) as error:
            yield f"no result.json: {error}"
            return
        account = result["account"]
        for node in account["nodes"]:
            off_s = abs(sum(node["seconds"].values()) - account["wall_s"])
            if off_s > 0.1:
                yield f"the buckets of node {node['host']} miss its wall time by {off_s:.3f} s"
        if len(result["restarts"]) < self.restarts:
            yield f"{self.restarts} faults of ranks and nodes, but {len(result['restarts'])} restarts are told"

    def _lines(self, run):
        """Each line of each rank is once in the merged file, in order; of a lost node the first ones are."""
        for cycle in sorted(run.glob("cycle_*")):
            path = self.place / f"train_cycle{cycle.name.partition('_')[2]}.log"
            merged = path.read_bytes().splitlines() if path.exists() else []
            of_rank: dict[bytes, list[bytes]] = {}
            for line in merged:
                prefix, _, text = line.partition(b": ")
                if text.startswith(b"rank "):
                    of_rank.setdefault(prefix, []).append(text)
            for path in cycle.glob("node_*/rank_*.out"):
                prefix = rank_prefix(int(path.stem.partition("_")[2]), _WORLD)[:-2]
                wrote = [line for line in path.read_bytes().splitlines() if line.startswith(b"rank ")]
                came = of_rank.get(prefix, [])
                if came != wrote[: len(came)] or (len(came) < len(wrote) - 1 and not self._may_lack(path)):
                    yield f"{path.relative_to(run)}: wrote {len(wrote)} lines, {len(came)} are in the merged file"

    def _may_lack(self, path):
        """Whether its node was lost: nobody is left to send the last lines."""
        return any(path.parent.name.endswith(f"_{node}") for node in self.hurt)

    def _growth(self):
        """An agent that holds more after each of its last faults than after its third, fourth and fifth."""
        for (pid, _), seen in self.usage.items():
            if len(seen) < 8:
                continue
            first, last = (min(mb for mb, _ in part) for part in (seen[2:5], seen[-3:]))
            if last - first > _GROWN_MB:
                yield f"agent {pid} has grown by {last - first:.1f} MB in {len(seen)} faults"
            files = [min((files for _, files in part), key=Counter.total) for part in (seen[2:5], seen[-3:])]
            if files[1].total() - files[0].total() > _GROWN_FDS:
                yield f"agent {pid} has more open files after {len(seen)} faults: {files[1] - files[0]}"
        if len(self.processes_seen) > 6 and self.processes_seen[-1] - self.processes_seen[2] > _GROWN_PROCESSES:
            yield f"the job's processes after each fault: {self.processes_seen}"
        if not self.counters:
            yield "no counter was read from the metrics file"


def _kinds_of_files(fds):
    for fd in fds.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield re.sub(r"\d+", "#", os.readlink(fd))


# --- faults: each returns what it did, or None where it cannot happen now ---------------------------------------------


def _signal_rank(signum):
    def strike(job):
        rank = job.rng.randrange(_WORLD)
        target = init.process(job.pids[rank])
        if target is None or not init.signal_process(target, signum):
            return None
        job.restarts, job.raised = job.restarts + 1, False
        return f"{signum.name} to rank {rank}"

    return strike


def _raise(job):
    if job.raised:  # the same failure at the same step on several nodes would end the job, as it should
        return None
    job.raised = True
    rank = job.rng.randrange(_WORLD)
    (job.place / f"raise.{rank}").touch()
    job.restarts += 1
    return f"rank {rank} raises"


def _signal_role(role, signum, lasts_s=0.0, least_s=_YOUNG_S):
    def strike(job):
        found = job.processes(role)
        if signum == signal.SIGKILL:
            found = [one for one in found if time.monotonic() - one.start / os.sysconf("SC_CLK_TCK") >= least_s]
        if not found:
            return None
        target = job.rng.choice(found)
        if not init.signal_process(target, signum):
            return None
        if lasts_s:
            time.sleep(lasts_s)
            init.signal_process(target, signal.SIGCONT)
        return f"{signum.name} to the {role} with pid {target.pid}" + (f" for {lasts_s:g} s" if lasts_s else "")

    return strike


def _kill_agent(job):
    """Its node is out of the job, and its keeper lives on for a while."""
    nodes = {one.pid: node for one in job.processes("agent") if (node := job._node(one.pid))}
    if len(set(nodes.values())) < NODES:
        return None
    pid = job.rng.choice(sorted(nodes))
    target = init.process(pid)
    if target is None or not init.signal_process(target, signal.SIGKILL):
        return None
    job.hurt.add(nodes[pid])
    return f"the agent of node {nodes[pid]} is killed"


def _damage(job):
    """A bit in each state that a keeper has, and a rank is killed. No save is under way: all have their checksum."""
    keepers = job.processes("keeper")
    rank = job.rng.randrange(_WORLD)
    target = init.process(job.pids[rank])
    if not keepers or target is None or not init.signal_process(target, signal.SIGSTOP):
        return None
    time.sleep(_REST_S)
    pid, count = job.rng.choice(keepers).pid, 0
    with contextlib.suppress(FileNotFoundError):
        for path in [*Path(f"/proc/{pid}/fd").iterdir()]:
            count += _flip(path)
    init.signal_process(target, signal.SIGKILL)
    job.restarts, job.raised = job.restarts + 1, False
    return f"a bit in {count} states of the keeper with pid {pid}, and SIGKILL to rank {rank}"


def _flip(path):
    """The lowest bit of the memory of a state; False: it is something else."""
    try:
        if "nvrx-checkpoint" not in os.readlink(path):
            return False
        with path.open("r+b", buffering=0) as memory:
            byte = memory.read(1)
            memory.seek(0)
            memory.write(bytes([byte[0] ^ 1]))
    except OSError:
        return False
    return True


def _lose(job, choose):
    nodes = sorted({node for one in job.processes("agent") if (node := job._node(one.pid))})
    if job.lost or len(nodes) < NODES:
        return None
    job.lost = choose(nodes)
    job.hurt.add(job.lost)
    job.soak.cluster.kill_node(job.lost)
    return f"node {job.lost} is lost"


FAULTS: dict[str, Callable[[Job], str | None]] = {
    "rank-killed": _signal_rank(signal.SIGKILL),
    "rank-stopped": _signal_rank(signal.SIGSTOP),
    "rank-raises": _raise,
    "node-lost": lambda job: _lose(job, lambda nodes: job.rng.choice(nodes[1:])),
    "first-node-lost": lambda job: _lose(job, lambda nodes: nodes[0]),
    "agent-killed": _kill_agent,
    "agent-stopped": _signal_role("agent", signal.SIGSTOP, 1.0),
    "monitor-killed": _signal_role("monitor", signal.SIGKILL),
    "template-killed": _signal_role("template", signal.SIGKILL),
    "standby-killed": _signal_role("standby", signal.SIGKILL, least_s=0.0),
    "keeper-killed": _signal_role("keeper", signal.SIGKILL, least_s=0.0),
    "keeper-stopped": _signal_role("keeper", signal.SIGSTOP, 1.0),
    "bits-flipped": _damage,
    "shipper-killed": _signal_role("shipper", signal.SIGKILL),
    "aggregator-killed": _signal_role("aggregator", signal.SIGKILL),
}


def main():
    """Returns 1 at a finding."""
    parser = argparse.ArgumentParser(prog="scripts/dev/soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="with --hours: the sum; default 10 minutes")
    parser.add_argument("--job", type=float, default=_JOB_S, help="seconds of faults in one job; default %(default)g")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if why := MiniCluster.available():
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    root = Path(tempfile.mkdtemp(prefix="nvrx-soak-"))
    os.environ["TMPDIR"] = str(root)
    soak = Soak(root, random.Random(args.seed), args.job)
    soak.say(f"seed {args.seed}, files in {root}")
    try:
        soak.run(3600 * args.hours + 60 * args.minutes or 600.0)
    except NvrxError as error:
        soak.find(str(error))
    finally:
        stray = soak.cluster.down()
        left = await_end(running_with(str(root)), 5.0)
        if stray or left:
            soak.find(f"left at the end: {[*stray, *left][:5]}")
    print("\nfault               times")
    for kind in FAULTS:
        print(f"{kind:18} {soak.counts[kind]:6}")
    print(soak.states.summary())
    print(f"{soak.jobs} jobs, {soak.counts.total()} faults, {len(soak.findings)} findings")
    if soak.findings:
        print("\n".join(["", *soak.findings, f"evidence: {root}"]))
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
