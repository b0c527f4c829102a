"""Slow ranks in real jobs (gloo, 2 nodes x 4 ranks) beside NVRx's own rule on the same steps.

    PYTHONPATH=scripts/lib python -m benchmarks.stragglers_job [--runs 20] [--windows 100] [--window 2] [--nvrx]

In each run one rank works 20 % longer; in every second run another has half of the work, so that it waits most. Then
one job without a slow rank. NVRx's ReportGenerator (0.4.1, in an environment of its own) gets the medians of each
window's sections, over gloo: what its Detector would give it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from benchmarks.harness import Failure, Job, Launcher, become_subreaper, kill_all_children
from benchmarks.nvrx_venv import make_venv

RANKS, FACTOR, PROMISED = 8, 1.2, 3  # windows until the slow rank is named
_START_S, _LIFE_WINDOWS = 90.0, 5.5  # the first window does not count: it has the first steps
_HERE, _RESULTS = Path(__file__).parent, Path(__file__).with_name("results")
_FLAGS = ("--log-dir=logs", "--ft-preload=torch", "--ft-waiting-sections=backward")


class Trace(NamedTuple):
    """One job. `slow`: -1 = none. `said`: windows in which something was slow, what, and which ranks."""

    slow: int
    said: list[tuple[int, str, list[int]]]
    steps: list[list[list[float]]]  # by rank: ms of work, wait and processor of each step


def trace(slow, light, window_s, windows):
    """Run a job for so many windows."""
    program = (str(Path(sys.executable).with_name("nvrx-run")),)
    launcher = Launcher("nvrx-run", program, (*_FLAGS, f"--ft-straggler-window={window_s}"))
    with Job(launcher, worker=str(_HERE / "stragglers_worker.py")) as job:
        job.start("2", RANKS // 2, f"{slow} {FACTOR} {light} {windows * window_s} {job.scratch}")
        codes = [node.wait(windows * window_s + _START_S) for node in job.nodes]
        if any(codes):
            raise Failure(f"the job ended with {codes}\n{job.said(0)}")
        (log,) = job.scratch.glob("logs/bench/r0/events/coordinator.jsonl")
        steps = [json.loads((job.scratch / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
        return Trace(slow, list(_said(log)), steps)


def _said(log):
    for line in filter(None, log.read_text().splitlines()):
        event = json.loads(line).get("event", {})
        if event.get("type") == "SlowSeen" and event["found"]:
            yield event["windows"], event["found"]["where"], event["found"]["ranks"]


def medians(one, window_s):
    """By window and rank, the median work, wait and processor time in ms."""
    many = max(3, round(1e3 * window_s / median_low([work + wait for work, wait, _ in one.steps[0]])))
    starts = range(many, min(map(len, one.steps)) - many + 1, many)  # without the first window, as ours
    return [
        [
            tuple(map(median_low, zip(*part, strict=True)))
            for part in (steps[start : start + many] for steps in one.steps)
        ]
        for start in starts
    ]


def nvrx_flags(traces, window_s):
    """By trace and window, the ranks that NVRx's rule flags by each score; None: it cannot be installed."""
    venv = make_venv(_RESULTS)
    if venv is None:
        return None
    told = _RESULTS / "stragglers_windows.json"
    windows = [[[rank[:2] for rank in ranks] for ranks in medians(one, window_s)] for one in traces]
    told.write_text(json.dumps(windows))
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    command = [str(venv / "bin" / "python"), *launch, str(_HERE / "stragglers_nvrx.py"), str(told)]
    done = subprocess.run(command, capture_output=True, timeout=600, text=True)
    if done.returncode:
        raise Failure(f"NVRx's rule: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def busiest(one, window_s):
    """By window, the ranks that use the processor 10 % longer than the median rank does in each step."""
    used = ([cpu for _, _, cpu in ranks] for ranks in medians(one, window_s))
    return [[rank for rank, cpu in enumerate(some) if cpu > 1.1 * median_low(some)] for some in used]


def row(name, traces, flagged):
    """`flagged`: by trace and window, the ranks that a rule names."""
    slow = [(one.slow, windows) for one, windows in zip(traces, flagged, strict=True) if one.slow >= 0]
    clean = [windows for one, windows in zip(traces, flagged, strict=True) if one.slow < 0]
    named = sum(any(rank in ranks for ranks in windows[:PROMISED]) for rank, windows in slow)
    wrong = sum(any({*ranks} - {rank} for ranks in windows) for rank, windows in slow)
    seen = [ranks for windows in clean for ranks in windows]
    return f"| {name} | {named} of {len(slow)} | {wrong} of {len(slow)} | {sum(map(bool, seen))} of {len(seen)} |"


def ours(one, windows):
    """By window, the ranks that the launcher has named. Whatever else it says is said of rank -2."""
    found = [[] for _ in range(windows)]
    for number, where, ranks in one.said:
        found[min(number, windows) - 1] = ranks if where == "rank" else [*ranks, -2]
    return found


def main():
    """Exit code 0: 95 % of the slow ranks are named in time, no other one ever, and no clean window alarms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="jobs with a slow rank [20]")
    parser.add_argument("--windows", type=int, default=100, help="windows of the job without [100]; 0: no such job")
    parser.add_argument("--window", type=float, default=2.0, metavar="S", help="their length [2]")
    parser.add_argument("--nvrx", action="store_true", help="also NVRx's rule")
    args = parser.parse_args()
    become_subreaper()
    traces = []
    try:
        for run in range(args.runs):
            slow = run % RANKS
            traces.append(trace(slow, (slow + 3) % RANKS if run % 2 else -1, args.window, _LIFE_WINDOWS))
            print(f"run {run}: rank {slow} is slow; said: {traces[-1].said}", flush=True)
        if args.windows:
            traces.append(trace(-1, -1, args.window, args.windows + 3))
            load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
            print(f"none is slow; said: {traces[-1].said}; load of this machine {load}", flush=True)
        theirs = nvrx_flags(traces, args.window) if args.nvrx else None
    finally:
        kill_all_children()
    return _report(traces, theirs, args.window)


def _report(traces, theirs, window_s):
    mine = [ours(one, max(PROMISED, len(medians(one, window_s)))) for one in traces]
    print(
        "\n| rule | slow rank named in 3 windows | another one named | clean windows with an alarm |\n|---|---|---|---|"
    )
    print(row("nvrx-run", traces, mine))
    print(row("processor time of a step", traces, [busiest(one, window_s) for one in traces]))
    for score in theirs[0][0] if theirs else ():
        print(row(f"NVRx: {score}", traces, [[window[score] for window in windows] for windows in theirs]))
    slow = [(one.slow, found) for one, found in zip(traces, mine, strict=True) if one.slow >= 0]
    named = sum(any(rank in ranks for ranks in found[:PROMISED]) for rank, found in slow)
    right = all(not {*ranks} - {one.slow} for one, found in zip(traces, mine, strict=True) for ranks in found)
    return 0 if right and named >= 0.95 * len(slow) else 1


if __name__ == "__main__":
    sys.exit(main())
