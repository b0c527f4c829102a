"""From an event to the first user line in all ranks: cold start, restart after a fault, lost node."""

import os
import random
import select
import signal
import time
from pathlib import Path

from namespaces import Network, unusable

from benchmarks import procfs
from benchmarks.figures import Figure, in_turns, interleaved, only_ours
from benchmarks.harness import EVENT_TIMEOUT_S, Failure, Job

_NPROC = 2
_GROUP = 3  # one dies, one waits in C, one waits for that in a collective
SAVE_S = 10.0  # of benchmarks/torch_worker.py
_TORCH_WORKER = str(Path(__file__).with_name("torch_worker.py"))
_SETTLE_S = 0.4  # a job that has just started is not what a fault usually hits


def _last(events):
    return max(event.at_s for event in events)


def _settle():
    """At a random phase of a launcher that polls (torchrun: every 0.1 s)."""
    time.sleep(_SETTLE_S + random.uniform(0.0, 0.2))


def _cold_start(launcher, nodes, nproc=_NPROC):
    with Job(launcher) as job:
        job.start(str(nodes), nproc, "wait")
        return _last(job.wait(nodes * nproc, "started")) - job.started_s


def _restart(launcher, nodes):
    """From the moment just before a rank's exit to the last first line of the next cycle."""
    with Job(launcher) as job:
        job.start(str(nodes), _NPROC, "wait", ["--max-restarts=1"] if launcher.program else [])
        first = job.wait(nodes * _NPROC, "started")
        _settle()
        victim = max(first, key=lambda event: event.rank)
        os.kill(victim.pid, signal.SIGUSR1)
        dying = job.wait(1, "dying")
        if not launcher.program:
            job.start("1", _NPROC, "wait")
        again = job.wait(nodes * _NPROC, "started", _last(dying))
        return _last(again) - _last(dying)


def _killed(launcher, mode, then, count):
    """From the SIGKILL of a rank to the last of `count` events `then`."""
    with Job(launcher, worker=_TORCH_WORKER) as job:
        job.start("1", _GROUP, mode, ["--max-restarts=1"])
        first = job.wait(_GROUP, "blocked")
        _settle()
        at_s = time.monotonic()
        os.kill(max(first, key=lambda event: event.rank).pid, signal.SIGKILL)
        return _last(job.wait(count, then, at_s)) - at_s


def _restart_handler(launchers, repeats):
    """A rank that saves in its handler must be left its time, or the figure is worth nothing."""
    if (saved_s := _killed(launchers.ours, "saving", "saved", _GROUP - 1)) < SAVE_S:
        raise Failure(f"the ranks said after {saved_s:.1f} s that they have saved for {SAVE_S:g} s")
    return interleaved(lambda who: _killed(who, "handler", "started", _GROUP), [launchers.ours], repeats)


def _lost_node(launcher):
    """2 active nodes and 1 spare; the node that holds the highest rank (not the coordinator's) is killed."""
    with Job(launcher) as job:
        job.start("2:3", _NPROC, "wait", ["--max-restarts=1"])
        first = job.wait(2 * _NPROC, "started")
        _settle()
        victims = {event.pid for event in first if event.rank >= _NPROC}
        (node,) = [node for node in job.nodes if victims <= procfs.family(node.pid)]
        at_s = time.monotonic()
        for pid in (node.pid, *victims):
            os.kill(pid, signal.SIGKILL)
        return _last(job.wait(2 * _NPROC, "started", at_s)) - at_s


def _lost_coordinator(launcher):
    """2 active nodes and 2 spares; the node that coordinates the job, and runs the first ranks, is killed."""
    with Job(launcher) as job:
        job.start("2:4", _NPROC, "wait", ["--max-restarts=1"])
        first = job.wait(2 * _NPROC, "started")
        _settle()
        coordinator = job.nodes[0].pid
        victims = [event.pid for event in first if event.pid in procfs.family(coordinator)]
        if len(victims) != _NPROC or "coordinator listens" not in job.said(0):
            raise Failure(f"node 0 does not coordinate the job, or runs {len(victims)} ranks")
        at_s = time.monotonic()
        for pid in (coordinator, *victims):
            os.kill(pid, signal.SIGKILL)
        return _last(job.wait(2 * _NPROC, "started", at_s)) - at_s


def _silent_coordinator(launcher):
    """The same with a network: the coordinator's link is cut. Its ranks have to end before they start elsewhere."""
    if why := unusable():
        raise Failure(why)
    with Network(4) as network, Job(launcher) as job:
        keepalive = ["--ft-keepalive-interval=1", "--ft-keepalive-timeout=1", "--max-restarts=1"]
        job.start("2:4", 1, "wait", keepalive, network)
        first = job.wait(2, "started")
        _settle()
        old = os.pidfd_open(next(event.pid for event in first if event.rank == 0))
        at_s = time.monotonic()
        network.unplug({0})
        select.select([old], [], [], EVENT_TIMEOUT_S)
        ended_s = time.monotonic()
        os.close(old)
        again = job.wait(2, "started", at_s)
        new = next(event for event in again if event.rank == 0)
        if new.at_s < ended_s or new.pid in procfs.family(job.nodes[0].pid):
            raise Failure("rank 0 ran twice, or runs on the node that is cut off")
        return _last(again) - at_s


def _figure(name, what, target_s, one, floor):
    def who(launchers):
        return [launchers.floor, *launchers.rivals()] if floor else launchers.rivals()

    return Figure(name, what, "s", target_s, in_turns(one, who))


def _lost(name, what, target_s, one):
    """torchrun ends the job where a node is lost, and so it has no such figure."""
    return Figure(name, what, "s", target_s, in_turns(one, only_ours))


FIGURES = [
    _figure("start-1", "cold start, 1 node x 2", 0.20, lambda who: _cold_start(who, 1), True),
    _figure("start-8", "cold start, 1 node x 8", 0.30, lambda who: _cold_start(who, 1, 8), True),
    _figure("start-2", "cold start, 2 nodes x 2", 0.30, lambda who: _cold_start(who, 2), False),
    _figure("restart-1", "restart after a rank exits, 1 node x 2", 0.08, lambda who: _restart(who, 1), True),
    _figure("restart-2", "restart after a rank exits, 2 nodes x 2", 0.11, lambda who: _restart(who, 2), False),
    Figure(
        "restart-handler",
        "the same, others in C with gloo and SIGTERM handlers",
        "s",
        1.2,
        _restart_handler,
    ),
    _lost("lost-node", "lost node to the promoted spare's first line", 0.3, _lost_node),
    _lost("lost-coordinator", "lost coordinator to the spare's first line, 4 nodes", 0.4, _lost_coordinator),
    _lost("silent-coordinator", "the same by a cut link, keepalive 1 s + 1 s", 3.0, _silent_coordinator),
]
