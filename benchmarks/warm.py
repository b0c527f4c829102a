"""With torch and without a flag: from an event to the line after `import torch` in all ranks; the memory of workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import procfs
from benchmarks.figures import Figure, Launchers, Samples, interleaved
from benchmarks.harness import EVENT_TIMEOUT_S, Event, Failure, Job, Launcher

_WORKER = str(Path(__file__).with_name("warm_worker.py"))
_AFTER_S = 1.0  # the fault comes so long after all ranks have passed their imports
_ROW = 10  # restarts, one after the other
_SETTLED_S = 2.0  # the same processes for so long
_NODES_OF = {"1": 1, "2": 2, "2:3": 2}
_OFF = "--ft-warm off"
_FLAGS = (f"--max-restarts={_ROW}", "--monitor-interval=0.1")


def _last(events: list[Event]) -> float:
    return max(event.at_s for event in events)


def _job(launcher: Launcher) -> Job:
    return Job(launcher, worker=_WORKER)


def _crash_loops(launcher: Launcher) -> tuple[str, ...]:
    """Ten faults, one second after each start, are a crash loop: its pauses are not what is measured."""
    return (*_FLAGS, "--ft-crash-loop-backoff=0") if launcher.name in ("nvrx-run", _OFF) else _FLAGS


def _start(job: Job, launcher: Launcher, nnodes: str, nproc: int) -> list[Event]:
    job.start(nnodes, nproc, "", _crash_loops(launcher))
    return job.wait(_NODES_OF[nnodes] * nproc, "imported")


def _fault(job: Job, ranks: list[Event], then: str = "imported") -> tuple[float, list[Event]]:
    """Seconds from the SIGKILL of the highest rank to `then` in the last rank, and who told that."""
    time.sleep(max(0.0, _last(ranks) + _AFTER_S - time.monotonic()))
    at_s = time.monotonic()
    os.kill(max(ranks, key=lambda event: event.rank).pid, signal.SIGKILL)
    again = job.wait(len(ranks), then, at_s)
    return _last(again) - at_s, again


def _restart(launcher: Launcher, nnodes: str, nproc: int, then: str = "imported") -> float:
    with _job(launcher) as job:
        return _fault(job, _start(job, launcher, nnodes, nproc), then)[0]


def _row(launcher: Launcher, nproc: int) -> float:
    """The slowest of the restarts; one of the others' is enough, whose restarts are alike."""
    with _job(launcher) as job:
        ranks, took_s = _start(job, launcher, "1", nproc), []
        for _ in range(_ROW if launcher.name == "nvrx-run" else 1):
            one_s, ranks = _fault(job, ranks)
            took_s.append(one_s)
        return max(took_s)


def _lost_node(launcher: Launcher) -> float:
    """2 active nodes and 1 spare; the node with the highest rank is killed."""
    with _job(launcher) as job:
        ranks = _start(job, launcher, "2:3", 2)
        victim = max(ranks, key=lambda event: event.rank).pid
        (node,) = [node for node in job.nodes if victim in procfs.family(node.pid)]
        time.sleep(max(0.0, _last(ranks) + 10 * _AFTER_S - time.monotonic()))  # a spare has time
        at_s = time.monotonic()
        for pid in (node.pid, *_workers(node.pid)):
            os.kill(pid, signal.SIGKILL)
        return _last(job.wait(2 * 2, "imported", at_s)) - at_s


def _cold_start(launcher: Launcher, nproc: int, then: str = "imported") -> float:
    with _job(launcher) as job:
        job.start("1", nproc, "", _FLAGS)
        return _last(job.wait(nproc, then)) - job.started_s


def _memory(launcher: Launcher, nproc: int) -> float:
    """Of the first cycle, when nothing is prepared any more."""
    with _job(launcher) as job:
        _start(job, launcher, "1", nproc)
        job.wait(nproc, "stepped")
        until_s, count = time.monotonic() + EVENT_TIMEOUT_S, nproc if launcher.name == _OFF else 2 * nproc + 1
        before = set[int]()
        while len(found := _workers(job.nodes[0].pid)) != count or found != before:
            if time.monotonic() > until_s:
                raise Failure(f"{launcher.name}: {len(found)} processes, not {count}: {job.said(0)[-2000:]}")
            before = found
            time.sleep(_SETTLED_S)
        return procfs.pss_mb(found)


def _workers(node: int) -> set[int]:
    """Of a node: workers, standbys and templates."""
    found = set()
    for pid in procfs.family(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] in (b"nvrx-standby", b"nvrx-template") or words[1:3] == [b"-u", _WORKER.encode()]:
            found.add(pid)
    return found


def _figure(
    name: str,
    what: str,
    target: float,
    one: Callable[[Launcher], float],
    *,
    unit: str = "s",
    base: str = "torchrun",
    theirs: bool = True,
) -> Figure:
    """`target`: of ours, as a share of that of `base`. `theirs`: other launchers have such a figure, too."""

    def measure(launchers: Launchers, repeats: int) -> Samples:
        rivals = launchers.rivals()[:-1] if theirs else []
        return interleaved(one, [*rivals, launchers.executed(), launchers.ours], repeats)

    return Figure(name, what, unit, target, True, measure, base)


FIGURES = [
    _figure("warm-restart-1", "torch imported 1 s ago: restart, 1 x 2", 0.05, partial(_restart, nnodes="1", nproc=2)),
    _figure("warm-restart-8", "the same, 1 x 8", 0.03, partial(_restart, nnodes="1", nproc=8)),
    _figure("warm-restart-2", "the same, 2 x 2", 0.05, partial(_restart, nnodes="2", nproc=2)),
    _figure("warm-row-1", "ten restarts, 1 s apart, the slowest, 1 x 2", 0.05, partial(_row, nproc=2)),
    _figure("warm-row-8", "the same, 1 x 8", 0.03, partial(_row, nproc=8)),
    _figure(
        "warm-step", "restart to the first step of AdamW, 1 x 2", 0.05,
        partial(_restart, nnodes="1", nproc=2, then="stepped"),
    ),
    _figure("warm-lost-node", "lost node, torch imported on the spare", 0.10, _lost_node, base=_OFF, theirs=False),
    _figure("warm-start-1", "cold start, torch imported, 1 x 1", 1.0, partial(_cold_start, nproc=1), base=_OFF),
    _figure("warm-start-8", "the same, 1 x 8", 0.35, partial(_cold_start, nproc=8), base=_OFF),
    _figure(
        "warm-first-step-8", "cold start to the first step of AdamW, 1 x 8", 0.5,
        partial(_cold_start, nproc=8, then="stepped"), base=_OFF,
    ),
    _figure(
        "warm-memory", "PSS of 8 workers, standbys, template, first cycle", 0.25,
        partial(_memory, nproc=8), unit="MB", base=_OFF, theirs=False,
    ),
]  # fmt: skip
