"""`scripts/bench`: measure, print the table, write it as JSON."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from benchmarks import (
    client,
    cycles,
    ends,
    hang,
    health,
    idle,
    inprocess,
    join,
    logs,
    memory_steps,
    procfs,
    ranks,
    slurm_api,
    warm,
)
from benchmarks.figures import Launchers, Result
from benchmarks.harness import Failure, Launcher, become_subreaper, kill_all_children
from benchmarks.nvrx_venv import make_venv

_MODULES = (cycles, hang, ends, client, idle, join, inprocess, ranks, health, logs, slurm_api, warm, memory_steps)
FIGURES = [figure for module in _MODULES for figure in module.FIGURES]
RESULTS = Path(__file__).with_name("results")
_COLUMNS = ("bare Python", "torchrun", "NVRx 0.4.1", "--ft-warm off", "nvrx-run")
_EXIT_MISSED = 1


def main():
    """Exit code 0: all targets that were measured are reached; 1: one is not, or could not be measured."""
    args = _arguments()
    if args.list:
        print("\n".join(f"{figure.name:18} {figure.what}" for figure in FIGURES))
        return 0
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        launchers = _launchers(args.nvrx, args.watch)
        results = [_measure(figure, launchers, args.repeats) for figure in FIGURES if _wanted(figure, args.names)]
    finally:
        kill_all_children()
    print("\n" + table(results))
    print(f"\nwritten to {_write(results, args.repeats)}")
    return 0 if all(result.reached() for result in results) else _EXIT_MISSED


def _arguments():
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Figures of nvrx-run beside torchrun.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures (or beginnings of names); default all")
    parser.add_argument("--list", action="store_true", help="list the figures")
    parser.add_argument("--nvrx", action="store_true", help="also NVRx 0.4.1, in a venv of its own")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each launcher, the median counts [5]")
    parser.add_argument("--watch", type=float, default=600.0, metavar="S", help="seconds of figure false-alarms [600]")
    args = parser.parse_args()
    for name in args.names:
        if not any(figure.name.startswith(name) for figure in FIGURES):
            parser.error(f"no figure is called {name}; see --list")
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


def _wanted(figure, names):
    return not names or any(figure.name.startswith(name) for name in names)


def _launchers(nvrx, watch_s):
    here = Path(sys.executable).parent
    venv = make_venv(RESULTS) if nvrx else None
    return Launchers(
        floor=Launcher("bare Python"),
        torchrun=Launcher("torchrun", (str(here / "torchrun"),)),
        ours=Launcher("nvrx-run", (str(here / "nvrx-run"),), ("--log-dir=logs",)),
        nvrx=Launcher("NVRx 0.4.1", (str(venv / "bin" / "ft_launcher"),), client="nvrx") if venv else None,
        watch_s=watch_s,
    )


def _measure(figure, launchers, repeats):
    print(f"{figure.name}: {figure.what} ...", end="", flush=True)
    try:
        result = Result(figure, figure.measure(launchers, repeats))
    except Failure as failure:
        result = Result(figure, {}, note=str(failure))
        print(f" failed: {failure}")
        return result
    shown = ", ".join(f"{name} {result.median(name):.3f}" for name in result.samples)
    print(f" {shown} {figure.unit} ({'reached' if result.reached() else 'MISSED'})")
    return result


def table(results):
    """Markdown: medians, our ratio to torchrun or NVRx, target, reached."""
    rows = [("what", *_COLUMNS, "ratio", "target", "reached")]
    for result in results:
        figure, ratio = result.figure, result.ratio()
        medians = [_shown(result.median(name), figure.unit) for name in _COLUMNS]
        target = f"<= {figure.target:g}{' x ' + figure.base if figure.relative else ' ' + figure.unit}"
        reached = "yes" if result.reached() else "NO"
        rows.append((figure.what, *medians, "-" if ratio is None else f"{ratio:.3f}", target, reached))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(cells)} |" for cells in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _shown(value, unit):
    if value is None:
        return "-"
    if value == float("inf"):
        return "never"
    digits = {"s": 3, "us": 2, "% of a core": 3}.get(unit, 1)
    return f"{value:.{digits}f} {unit}"


def _write(results, repeats):
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    content = {
        "machine": procfs.machine(),
        "python": sys.version.split()[0],
        "repeats": repeats,
        "figures": {
            result.figure.name: {
                "what": result.figure.what,
                "unit": result.figure.unit,
                "target": result.figure.target,
                "relative": result.figure.relative,
                "ratio": result.ratio(),
                "reached": result.reached(),
                "note": result.note,
                "load": result.load,
                "samples": result.samples,
            }
            for result in results
        },
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
