"""With torch: from an event to the line after `import torch` in all ranks, and the memory of workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import procfs
from benchmarks.figures import Figure, Launchers, Samples, interleaved
from benchmarks.harness import EVENT_TIMEOUT_S, WORKER, Event, Failure, Job, Launcher

_POLL_S = 0.02
_NODES_OF = {"1": 1, "2": 2, "2:3": 2}
_MODULES = "torch,torch._dynamo"  # the second one is what the first optimizer imports
_OFF = "--ft-warm off"


def _last(events: list[Event]) -> float:
    return max(event.at_s for event in events)


def _scripts(node: int) -> set[int]:
    """Processes of a node with the command line of a worker: workers, standbys and templates."""
    found = set()
    for pid in procfs.family(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:3] == [b"-u", WORKER.encode()]:
            found.add(pid)
    return found


def _start(job: Job, launcher: Launcher, nnodes: str, nproc: int, warm: bool) -> list[Event]:
    """Start the job; returns when all ranks have made a step and, if `warm`, each rank of each node has a standby."""
    job.start(nnodes, nproc, "torch", ["--max-restarts=1"])
    first = job.wait(_NODES_OF[nnodes] * nproc, "imported")
    job.wait(_NODES_OF[nnodes] * nproc, "stepped")
    if not warm:
        return first
    ranks = {event.pid for event in first}
    until_s = time.monotonic() + EVENT_TIMEOUT_S
    before: list[set[int]] = []
    while True:
        waiting = [_scripts(node.pid) - ranks for node in job.nodes]
        if waiting == before and all(len(pids) == nproc + 1 for pids in waiting):
            return first
        if time.monotonic() > until_s:
            raise Failure(f"{launcher.name}: no standbys within {EVENT_TIMEOUT_S:g} s: {job.said(0)[-2000:]}")
        before = waiting
        time.sleep(_POLL_S)


def _restart(launcher: Launcher, nnodes: str, nproc: int, warm: bool) -> float:
    with Job(launcher) as job:
        first = _start(job, launcher, nnodes, nproc, warm)
        at_s = time.monotonic()
        os.kill(max(first, key=lambda event: event.rank).pid, signal.SIGKILL)
        return _last(job.wait(_NODES_OF[nnodes] * nproc, "imported", at_s)) - at_s


def _lost_node(launcher: Launcher, nproc: int, warm: bool) -> float:
    """2 active nodes and 1 spare; the node with the highest rank is killed."""
    with Job(launcher) as job:
        first = _start(job, launcher, "2:3", nproc, warm)
        victim = max(first, key=lambda event: event.rank).pid
        (node,) = [node for node in job.nodes if victim in procfs.family(node.pid)]
        at_s = time.monotonic()
        for pid in (node.pid, *_scripts(node.pid)):
            os.kill(pid, signal.SIGKILL)
        return _last(job.wait(2 * nproc, "imported", at_s)) - at_s


def _cold_start(launcher: Launcher, nproc: int) -> float:
    with Job(launcher) as job:
        job.start("1", nproc, "torch")
        return _last(job.wait(nproc, "imported")) - job.started_s


def _memory(launcher: Launcher, nproc: int, warm: bool) -> float:
    with Job(launcher) as job:
        _start(job, launcher, "1", nproc, warm)
        return procfs.pss_mb(_scripts(job.nodes[0].pid))


def _figure(
    name: str,
    what: str,
    target: float,
    one: Callable[[Launcher, bool], float],
    *,
    unit: str = "s",
    base: str = "",
    preload: str = _MODULES,
    theirs: bool = True,
) -> Figure:
    """`one(launcher, warm)`. `preload`: value of that flag. `theirs`: other launchers have such a figure, too."""

    def measure(launchers: Launchers, repeats: int) -> Samples:
        ours = replace(launchers.ours, flags=(*launchers.ours.flags, f"--ft-preload={preload}"))
        who = [*(launchers.rivals()[:-1] if theirs else []), launchers.executed(), ours]
        return interleaved(lambda launcher: one(launcher, launcher.name == ours.name), who, repeats)

    return Figure(name, what, unit, target, bool(base), measure, base or "torchrun")


FIGURES = [
    _figure("warm-restart-1", "restart, torch imported, 1 x 2", 0.10, lambda who, warm: _restart(who, "1", 2, warm)),
    _figure(
        "warm-restart-auto",
        "the same without a flag",
        0.10,
        lambda who, warm: _restart(who, "1", 2, warm),
        preload="auto",
    ),
    _figure("warm-restart-8", "restart, torch imported, 1 x 8", 0.25, lambda who, warm: _restart(who, "1", 8, warm)),
    _figure("warm-restart-2", "restart, torch imported, 2 x 2", 0.15, lambda who, warm: _restart(who, "2", 2, warm)),
    _figure(
        "warm-lost-node",
        "lost node, torch imported on the spare",
        0.20,
        lambda who, warm: _lost_node(who, 2, warm),
        theirs=False,
    ),
    _figure(
        "warm-start-8",
        "cold start, torch imported, 1 x 8",
        0.35,
        lambda who, warm: _cold_start(who, 8),
        base=_OFF,
        preload="torch",
    ),
    _figure(
        "warm-memory",
        "PSS of 8 workers, standbys, template",
        0.30,
        lambda who, warm: _memory(who, 8, warm),
        unit="MB",
        base=_OFF,
        theirs=False,
    ),
]
