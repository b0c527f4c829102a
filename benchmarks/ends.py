"""Ends that come in time, and none that should not: nested sections, a loaded node, a rank that asks for the end."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from benchmarks.figures import Figure, in_turns, only_ours
from benchmarks.harness import Failure, Job, wait_dead

_TIMEOUT_S = 1.0
_RANKS = 8
_SETTLE_S = 2.0
_GIVE_UP_S = 15.0
_LIMITS = [f"--ft-initial-rank-heartbeat-timeout={_TIMEOUT_S}", f"--ft-rank-heartbeat-timeout={_TIMEOUT_S}"]
_NESTED = [f"--ft-rank-section-timeouts=outer:{_TIMEOUT_S},middle:600,inner:600"]
_BEAT = f"beat {_TIMEOUT_S / 4}"
_MISSED = float("inf")


def _nested_ms(launcher):
    """The outermost of three sections expires: how long after that the rank is dead; inf = not within 15 s."""
    with Job(launcher) as job:
        job.start("1", 1, "nested", _NESTED)
        (opened,) = job.wait(1, "opened")
        try:
            return (wait_dead(opened.pid, _GIVE_UP_S) - opened.at_s - _TIMEOUT_S) * 1000
        except Failure:
            return _MISSED


@contextlib.contextmanager
def _all_cores_busy():
    """One process per core that does nothing else than to compute, at normal priority."""
    code = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def _loaded_ms(launcher):
    """8 ranks and as many busy processes as cores: last heartbeat of one rank + timeout to its death."""
    with _all_cores_busy(), Job(launcher) as job:
        job.start("1", _RANKS, _BEAT, _LIMITS)
        first = job.wait(_RANKS, "started")
        time.sleep(_SETTLE_S)
        os.kill(first[-1].pid, signal.SIGUSR1)
        (heartbeat,) = job.wait(1, "heartbeat")
        return (wait_dead(heartbeat.pid, 2 * _GIVE_UP_S) - heartbeat.at_s - _TIMEOUT_S) * 1000


def _false_alarms(launcher, watch_s):
    """Ranks that were started anew in `watch_s` seconds of heartbeats at 1/4 of the timeout, with all cores busy."""
    with _all_cores_busy(), Job(launcher, life_s=watch_s + 60) as job:
        job.start("1", _RANKS, _BEAT, [*_LIMITS, "--max-restarts=1000000"])
        job.wait(_RANKS, "started")
        (node,) = job.nodes
        try:
            wait_dead(node.pid, watch_s)
        except Failure:
            job.hear()
            return float(sum(event.what == "started" for event in job.events) - _RANKS)
        raise Failure(f"{launcher.name} ended before {watch_s:g} s were over")


def _shutdown_s(launcher):
    """ShutdownWorkload by the last rank of 3 nodes x 2: from just before the call until all 6 workers are gone."""
    with Job(launcher) as job:
        job.start("3", 2, "shutdown", ["--max-restarts=1"])
        ranks = job.wait(6, "started")
        pidfds = [os.pidfd_open(rank.pid) for rank in ranks]
        os.kill(max(ranks, key=lambda rank: rank.rank).pid, signal.SIGUSR1)
        (asking,) = job.wait(1, "asking")
        gone_s = max(_dead_at(pidfd, rank) for pidfd, rank in zip(pidfds, ranks, strict=True))
        return gone_s - asking.at_s


def _dead_at(pidfd, rank):
    """When it was seen dead: at most a moment after the last of those that were waited for before it."""
    try:
        if not select.select([pidfd], [], [], _GIVE_UP_S)[0]:
            raise Failure(f"rank {rank.rank} lived on for {_GIVE_UP_S:g} s")
        return time.monotonic()
    finally:
        os.close(pidfd)


def _measure_alarms(launchers, _):
    return {launchers.ours.name: [_false_alarms(launchers.ours, launchers.watch_s)]}


FIGURES = [
    Figure("nested", "kill after the outermost of 3 sections expired", "ms", 15.0, in_turns(_nested_ms)),
    Figure("loaded-hang", "hang of 1 of 8 ranks, all cores busy: kill", "ms", 100.0, in_turns(_loaded_ms)),
    Figure("false-alarms", "8 ranks beat at 1/4 of the timeout, all cores busy", "ranks", 0.0, _measure_alarms),
    Figure("shutdown", "ShutdownWorkload, 3 nodes: workers gone", "s", 0.2, in_turns(_shutdown_s, only_ours)),
]
