"""Replay the interruptions of a published training run through the real cores: coordinator, agents, elections.

    scripts/dev/replay llama3                            10 seeds of 54 days with 2,048 nodes
    scripts/dev/replay llama3 --nodes 16384 --seeds 100 -j 2
    scripts/dev/replay llama3 --thin 1 --seeds 1         every node by itself: minutes
    scripts/dev/replay llama3 --memory                   checkpoints in memory, with copies on other nodes
    scripts/dev/replay llama3 --set init_s=60 --set hang_s=600 --picture page.svg

Ends with 1 where a promise of docs/explanation/replay-llama3.md does not hold.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "scripts" / "lib")]

from replay_llama3 import Outcome, Replay, findings, in_lines, run  # noqa: E402
from replay_picture import picture  # noqa: E402
from replay_world import MEMORY, Latencies  # noqa: E402


def main() -> int:
    """Returns 0 where all that the page promises holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["llama3"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed [0]")
    parser.add_argument("--nodes", type=int, action="append", help="training nodes, repeatable [2048]")
    parser.add_argument("--spares", type=int, default=32)
    parser.add_argument("--thin", type=int, help="nodes for which a simulated one stands [nodes / 64]")
    parser.add_argument("--memory", action="store_true", help="checkpoints in memory, and each 10 minutes on disk")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=S", help="a latency; see replay_world.py")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the picture of the page (SVG)")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes [1]")
    args = parser.parse_args()
    latencies = MEMORY if args.memory else Latencies()
    for name, _, value in (one.partition("=") for one in args.set):
        if not isinstance(getattr(latencies, name, None), float):
            parser.error(f"--set {name}: no such latency; there are {', '.join(vars(latencies))}")
        latencies = replace(latencies, **{name: float(value)})  # type: ignore[arg-type]
    found: list[tuple[Replay, list[Outcome]]] = []
    broken: list[str] = []
    for nodes in args.nodes or [2048]:
        thin = args.thin or max(1, nodes // 64)
        if args.seeds < 1 or nodes < thin or nodes % thin:
            parser.error("--seeds must be at least 1, and --nodes a multiple of --thin")
        job = Replay(nodes, args.spares * nodes // 2048 or 1, thin, latencies=latencies)
        with Pool(args.jobs) as pool:
            outcomes = pool.map(partial(run, job), range(args.first, args.first + args.seeds), chunksize=1)
        found.append((job, outcomes))
        print("\n".join(in_lines(job, outcomes)) + "\n")
        broken += findings(job, outcomes)
    if args.picture is not None:
        args.picture.write_text(picture(found))
    print("\n".join(f"MISSED: {one}" for one in broken) or "all that the page promises holds")
    return min(1, len(broken))


if __name__ == "__main__":
    sys.exit(main())
