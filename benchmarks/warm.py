"""With torch and without a flag: from an event to the line after `import torch` in all ranks; the memory of workers."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks import procfs
from benchmarks.figures import Figure, interleaved
from benchmarks.harness import EVENT_TIMEOUT_S, Failure, Job

_WORKER = str(Path(__file__).with_name("warm_worker.py"))
_AFTER_S = 1.0  # the fault comes so long after all ranks have passed their imports
_ROW = 10  # restarts, one after the other
_SETTLED_S = 2.0  # the same processes for so long
_NODES_OF = {"1": 1, "2": 2, "2:3": 2}
_OFF = "--ft-warm off"
_FLAGS = (f"--max-restarts={_ROW}", "--monitor-interval=0.1")


def _last(events):
    return max(event.at_s for event in events)


def _job(launcher, worker=_WORKER):
    return Job(launcher, worker=worker)


def _crash_loops(launcher):
    """Ten faults, one second after each start, are a crash loop: its pauses are not what is measured."""
    return (*_FLAGS, "--ft-crash-loop-backoff=0") if launcher.name in ("nvrx-run", _OFF) else _FLAGS


def _start(job, launcher, nnodes, nproc):
    job.start(nnodes, nproc, "", _crash_loops(launcher))
    return job.wait(_NODES_OF[nnodes] * nproc, "imported")


def _fault(job, ranks):
    """Seconds from the SIGKILL of the highest rank to the imports of the last rank, and who told that."""
    time.sleep(max(0.0, _last(ranks) + _AFTER_S - time.monotonic()))
    at_s = time.monotonic()
    os.kill(max(ranks, key=lambda event: event.rank).pid, signal.SIGKILL)
    again = job.wait(len(ranks), "imported", at_s)
    return _last(again) - at_s, again


def _restart(launcher, nnodes, nproc):
    with _job(launcher) as job:
        return _fault(job, _start(job, launcher, nnodes, nproc))[0]


class _Life(NamedTuple):
    """Of one job on one node, seconds to the last rank."""

    start_s: float  # from the start to the line after the imports
    first_step_s: float  # from the start to the end of the first step
    restart_s: float  # from the first SIGKILL to the line after the imports
    step_s: float  # from that SIGKILL to the end of the first step; 0 where it is not waited for
    slowest_s: float  # of the restarts: ten of ours, one of the others', whose restarts are alike


def _live(launcher, nproc, worker):
    steps = worker == _WORKER
    with _job(launcher, worker) as job:
        ranks = _start(job, launcher, "1", nproc)
        start_s = _last(ranks) - job.started_s
        first_step_s = _last(job.wait(nproc, "stepped")) - job.started_s if steps else 0.0
        restart_s, ranks = _fault(job, ranks)
        at_s = _last(ranks) - restart_s
        step_s = _last(job.wait(nproc, "stepped", at_s)) - at_s if steps and nproc == 2 else 0.0
        took_s = [restart_s]
        for _ in range(_ROW - 1 if steps and launcher.name == "nvrx-run" else 0):
            one_s, ranks = _fault(job, ranks)
            took_s.append(one_s)
        return _Life(start_s, first_step_s, restart_s, step_s, max(took_s))


@cache
def _lives(launchers, repeats, nproc, worker):
    """One job serves several figures."""
    who = [*launchers.rivals()[:-1], launchers.executed(), launchers.ours]
    return interleaved(partial(_live, nproc=nproc, worker=worker), who, repeats)


def _executed(launcher, case):
    """A start whose workers are executed in any case; `case`: why."""
    with _job(launcher) as job:
        script = job.scratch / "train"
        script.mkdir()
        main = script / "__main__.py"
        main.write_bytes(Path(_WORKER).read_bytes())
        flags, command = _crash_loops(launcher), [str(script if case == "text" else main)]
        if case == "python":
            wrapper = job.scratch / "python"
            wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            wrapper.chmod(0o755)
            job.env["PYTHON_EXEC"] = str(wrapper)
        elif case == "site":
            (job.scratch / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(job.scratch)!r})\n")
            job.env["PYTHONPATH"] = str(job.scratch)
        elif case == "program":
            flags, command = (*flags, "--no-python"), [sys.executable, "-u", *command]
        job.start("1", 2, "", flags, command=command)
        start_s = _last(job.wait(2, "imported")) - job.started_s
        return _Life(start_s, _last(job.wait(2, "stepped")) - job.started_s, 0.0, 0.0, 0.0)


@cache
def _differences(launchers, repeats, case):
    """Ours less those with `--ft-warm off`, start by start."""
    off = launchers.executed()
    found = interleaved(partial(_executed, case=case), [off, launchers.ours], repeats)
    pairs = zip(found[launchers.ours.name], found[off.name], strict=True)
    return [_Life(*(mine - its for mine, its in zip(*pair, strict=True))) for pair in pairs]


def _of_executed(case, what):
    def row(name, pick, to):
        def measure(launchers, repeats):
            return {"nvrx-run": [getattr(life, pick) for life in _differences(launchers, repeats, case)]}

        return Figure(f"warm-off-{case}{name}", f"{what}: later than with {_OFF}, {to}", "s", 0.03, measure)

    return [row("", "start_s", "import"), row("-step", "first_step_s", "first step")]


def _lost_node(launcher):
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


def _cold_start(launcher, nproc):
    with _job(launcher) as job:
        return _last(_start(job, launcher, "1", nproc)) - job.started_s


def _memory(launcher, nproc):
    """Of the first cycle, when nothing is prepared any more."""
    with _job(launcher) as job:
        _start(job, launcher, "1", nproc)
        job.wait(nproc, "stepped")
        until_s, count = time.monotonic() + EVENT_TIMEOUT_S, 2 * nproc + 1 if launcher.name == "nvrx-run" else nproc
        before = set()
        while len(found := _workers(job.nodes[0].pid)) != count or found != before:
            if time.monotonic() > until_s:
                raise Failure(f"{launcher.name}: {len(found)} processes, not {count}: {job.said(0)[-2000:]}")
            before = found
            time.sleep(_SETTLED_S)
        return procfs.pss_mb(found)


def _workers(node):
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


def _figure(name, what, target, one, *, unit="s", base="torchrun", theirs=True, once=False):
    """`target`: of ours, as a share of that of `base`. `theirs`: other launchers have such a figure, too. `once`: one
    run tells it."""

    def measure(launchers, repeats):
        rivals = launchers.rivals()[:-1] if theirs else []
        who = [*rivals, launchers.executed(), launchers.ours]
        return interleaved(one, who, 1, warm_up=0) if once else interleaved(one, who, repeats)

    return Figure(name, what, unit, target, measure, True, base)


def _of_life(name, what, target, nproc, pick, base="torchrun"):
    def measure(launchers, repeats):
        lives = _lives(launchers, repeats, nproc, _WORKER)
        return {who: [getattr(life, pick) for life in found] for who, found in lives.items()}

    return Figure(name, what, "s", target, measure, True, base)


def _of_library(library, target_s):
    """The worker is warm_LIBRARY.py; the target is in seconds."""

    def measure(launchers, repeats):
        if find_spec(library) is None:
            raise Failure(f"{library} is not installed for {sys.executable}")
        lives = _lives(launchers, repeats, 2, str(Path(__file__).with_name(f"warm_{library}.py")))
        return {who: [life.restart_s for life in found] for who, found in lives.items()}

    return Figure(f"warm-{library}", f"restart past the import of {library}, 1 x 2", "s", target_s, measure)


FIGURES = [
    _of_life("warm-restart-1", "torch imported 1 s ago: restart, 1 x 2", 0.05, 2, "restart_s"),
    _of_life("warm-row-1", "ten restarts, 1 s apart, the slowest, 1 x 2", 0.05, 2, "slowest_s"),
    _of_life("warm-step", "restart to the first step of AdamW, 1 x 2", 0.05, 2, "step_s"),
    _of_life("warm-restart-8", "torch imported 1 s ago: restart, 1 x 8", 0.03, 8, "restart_s"),
    _of_life("warm-row-8", "ten restarts, 1 s apart, the slowest, 1 x 8", 0.03, 8, "slowest_s"),
    _of_life("warm-start-8", "cold start, torch imported, 1 x 8", 0.35, 8, "start_s", _OFF),
    _of_life("warm-first-step-8", "cold start to the first step of AdamW, 1 x 8", 0.5, 8, "first_step_s", _OFF),
    _figure("warm-start-1", "cold start, torch imported, 1 x 1", 1.0, partial(_cold_start, nproc=1), base=_OFF),
    _of_library("transformers", 0.4),
    _of_library("lightning", 0.8),
    _figure(
        "warm-memory", "PSS of 8 workers, standbys, template, first cycle", 0.25,
        partial(_memory, nproc=8), unit="MB", base=_OFF, once=True,
    ),
    _figure(
        "nodes-warm-restart", "torch imported 1 s ago: restart, 2 x 2", 0.05, partial(_restart, nnodes="2", nproc=2)
    ),
    _figure("nodes-warm-lost", "lost node, torch imported on the spare", 0.10, _lost_node, base=_OFF, theirs=False),
    *_of_executed("text", "no text of a script"),
    *_of_executed("program", "--no-python"),
    *_of_executed("python", "another interpreter"),
    *_of_executed("site", "sitecustomize changes sys.path"),
]  # fmt: skip
