"""What the in-process wrapper costs: restarts, timeouts, entry and exit; what its helpers take while nothing happens.

Beside NVRx's wrapper: the same script with the other import, at default arguments unless the figure says otherwise.
Times are without `last_call_wait` (1 s in both).
"""

import os
import random
import signal
import sys
import time
from functools import cache
from pathlib import Path
from statistics import mean

from benchmarks import procfs
from benchmarks.figures import Figure, in_turns, interleaved, only_ours
from benchmarks.harness import Failure, Job, free_port, wait_dead
from nvrx_slurm.child.descendants import children

WORKER = str(Path(__file__).with_name("inprocess_worker.py"))
_LAST_CALL_WAIT_S = 1.0
_SOFT_S, _HARD_S, _GRACE_S = 1.5, 2.0, 0.5  # of the worker's modes `soft` and `hard`
_WINDOW_S = 20.0
_RESTARTS = 100


class _Ranks(Job):
    """Ranks that the harness starts itself."""

    def begin(self, size, mode):
        """Start them and let them go; the time at which the last one called the wrapped function."""
        python = Path(self._launcher.program[0]).with_name("python") if self._launcher.program else sys.executable
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(size):
            command = [str(python), WORKER, *mode.split()]
            self.nodes.append(self._spawn(command, self.scratch / f"{rank}.log", place | {"RANK": str(rank)}))
        self.wait(size, "ready")
        for node in self.nodes:
            node.send_signal(signal.SIGUSR1)
        called_s = max(event.at_s for event in self.wait(size, "calling"))
        self.wait(size, "entered")
        return called_s

    def helpers(self):
        """Monitor processes: pid -> their rank's number at the start. NVRx's are no children of their ranks."""
        ranks = {node.pid for node in self.nodes}
        found = {}
        for pid in set().union(*(procfs.family(child) for child in children(os.getpid()))) - ranks:
            try:
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if f"BENCH_FIFO={self.scratch}/fifo".encode() in env:
                found[pid] = next(int(word[5:]) for word in env if word.startswith(b"RANK="))
        return found


def _last(events):
    return max(event.at_s for event in events)


# --- restarts ---------------------------------------------------------------------------------------------------------


def _raise(size, mode="run"):
    """Restarts one after the other in one job; the first is not counted."""

    def restarts(launcher, repeats):
        took_s = []
        with _Ranks(launcher, 300.0) as job:
            job.begin(size, mode)
            for turn in range(repeats + 1):
                time.sleep(random.uniform(1.0, 2.0))  # anywhere between two looks of a wrapper that polls
                victim = job.nodes[turn % size]
                before_s = time.monotonic()
                victim.send_signal(signal.SIGUSR1)
                (raised,) = job.wait(1, "raising", before_s)
                took_s.append(_last(job.wait(size, "entered", before_s)) - raised.at_s - _LAST_CALL_WAIT_S)
        return took_s[1:]

    def measure(launchers, repeats):
        samples = {}
        for launcher in launchers.monitored():
            try:
                samples[launcher.name] = restarts(launcher, repeats)
            except Failure as failure:
                print(f"\n{failure}", file=sys.stderr)
        return samples

    return measure


def _kill(launcher):
    with _Ranks(launcher) as job:
        job.begin(4, "run")
        time.sleep(random.uniform(1.0, 2.0))
        at_s = time.monotonic()
        job.nodes[1].kill()
        return _last(job.wait(3, "entered", at_s)) - at_s - _LAST_CALL_WAIT_S


def _kill_launched(launcher):
    with Job(launcher, worker=WORKER) as job:
        job.start("1:2", 2, "run", ["--restart-policy=min-healthy", "--rdzv-conf=last_call_timeout=30"])
        ranks = {event.rank: event.pid for event in job.wait(4, "entered")}
        time.sleep(random.uniform(1.0, 2.0))
        at_s = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        return _last(job.wait(3, "entered", at_s)) - at_s - _LAST_CALL_WAIT_S


def _kill_node(launcher):
    """The second of two nodes with everything on it, the wrapper's monitor processes too: only the agent can tell."""
    with Job(launcher, worker=WORKER) as job:
        job.start("1:2", 2, "run", ["--restart-policy=min-healthy", "--rdzv-conf=last_call_timeout=30"])
        ranks = {event.rank: event.pid for event in job.wait(4, "entered")}
        node = next(node for node in job.nodes if ranks[2] in procfs.family(node.pid))
        time.sleep(random.uniform(1.0, 2.0))
        family = procfs.family(node.pid)
        node.send_signal(signal.SIGSTOP)  # or it would tell the death of its ranks before its own
        at_s = time.monotonic()
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        return _last(job.wait(2, "entered", at_s)) - at_s - _LAST_CALL_WAIT_S


def _soft(launcher):
    with _Ranks(launcher) as job:
        job.begin(2, "soft")
        time.sleep(random.uniform(1.0, 2.0))
        job.nodes[1].send_signal(signal.SIGUSR1)
        (hung,) = job.wait(1, "hanging")
        aborted = [event.at_s for event in job.wait(2, "aborted") if event.rank == 1]
        return 1e3 * (aborted[0] - hung.at_s - _SOFT_S - _LAST_CALL_WAIT_S)


def _hard(launcher):
    with _Ranks(launcher) as job:
        job.begin(2, "hard")
        time.sleep(random.uniform(1.0, 2.0))
        job.nodes[1].send_signal(signal.SIGUSR1)
        (hung,) = job.wait(1, "hanging")
        return 1e3 * (wait_dead(job.nodes[1].pid, 30.0) - hung.at_s - _HARD_S - _GRACE_S)


# --- entry and exit ---------------------------------------------------------------------------------------------------


@cache
def _life(launchers, repeats):
    """Seconds from the last call to the last entry, and from the last return to the end, of 4 ranks."""
    entry_s = {}

    def one(launcher):
        with _Ranks(launcher) as job:
            called_s = job.begin(4, "run")
            entry_s.setdefault(launcher.name, []).append(_last(job.wait(4, "entered")) - called_s)
            for node in job.nodes:
                node.send_signal(signal.SIGUSR2)
            return _last(job.wait(4, "left")) - _last(job.wait(4, "returning"))

    exit_s = interleaved(one, launchers.monitored(), repeats)
    return {name: values[1:] for name, values in entry_s.items()}, exit_s


# --- what it takes ----------------------------------------------------------------------------------------------------


def _ping(launcher):
    with _Ranks(launcher) as job:
        job.begin(1, "ping")
        return job.wait(1, "took")[0].at_s


def _threads(launcher):
    with _Ranks(launcher) as job:
        job.begin(2, "idle")
        return max(event.at_s for event in job.wait(2, "threads"))


def _processor(launcher):
    """Percent of a core per rank, the ranks' own processes with all threads of theirs included: they sleep."""
    with _Ranks(launcher) as job:
        job.begin(4, "idle")
        time.sleep(3.0)
        pids = {node.pid for node in job.nodes} | job.helpers().keys()
        before_s, at_s = procfs.processor_s(pids), time.monotonic()
        time.sleep(_WINDOW_S)
        return 100 * (procfs.processor_s(pids) - before_s) / (time.monotonic() - at_s) / 4


def _memory(launcher):
    with _Ranks(launcher) as job:
        job.begin(4, "idle")
        time.sleep(3.0)
        return mean(procfs.private_mb(pid) for pid, rank in job.helpers().items() if rank)


def _leak(launcher):
    """Of rank 0 with its monitor process, which holds the store."""
    with _Ranks(launcher) as job:
        job.begin(2, f"leak {_RESTARTS}")
        (late,), (early,) = job.wait(1, "late"), job.wait(1, "early")
        return late.at_s - early.at_s


def _figure(name, what, unit, target, one):
    return Figure(f"inprocess-{name}", what, unit, target, in_turns(one))


def _alone(name, what, unit, target, one):
    """NVRx has no such thing, or would take minutes."""
    return Figure(f"inprocess-{name}", what, unit, target, in_turns(one, only_ours))


FIGURES = [
    *(
        Figure(f"inprocess-raise-{n}", f"in-process: raise to re-entry everywhere, {n} ranks", "s", s, _raise(n))
        for n, s in ((2, 0.03), (4, 0.05), (8, 0.09))
    ),
    Figure("inprocess-busy", "the same with 2 ranks that compute all the time", "s", 0.03, _raise(2, "busy")),
    _figure("kill", "in-process: SIGKILL of one of 4 ranks to re-entry of the others", "s", 0.2, _kill),
    _alone("kill-launched", "the same under nvrx-run, 2 nodes x 2 ranks", "s", 0.1, _kill_launched),
    _alone("kill-node", "in-process under nvrx-run: loss of a node with everything on it", "s", 0.1, _kill_node),
    _figure("soft", "in-process: soft timeout, beyond the configured sum", "ms", 50.0, _soft),
    _figure("hard", "in-process: hard timeout with grace, beyond the configured sum", "ms", 50.0, _hard),
    Figure("inprocess-entry", "in-process: entry to first call, 4 ranks", "s", 0.1, lambda who, n: _life(who, n)[0]),
    Figure(
        "inprocess-exit",
        "in-process: all returned to wrapper returned",
        "s",
        0.05,
        lambda who, n: _life(who, n)[1],
    ),
    _figure("ping", "in-process: ping()", "us", 1.0, _ping),
    _figure("threads", "in-process: threads added to a rank", "", 3.0, _threads),
    _figure("idle", "in-process: idle, processor time per rank, 4 ranks", "% of a core", 0.1, _processor),
    _figure("memory", "in-process: private memory of a monitor process", "MB", 7.0, _memory),
    _alone("leak", f"in-process: private memory gained in {_RESTARTS} restarts", "MB", 1.0, _leak),
]
