"""Tell the story of one simulated job: the real coordinator and agents, a virtual clock, seeded faults.

    scripts/dev/simulate --nodes 80 --seed 7
    scripts/dev/simulate --nodes 8 --seed 0 --many 20000     seeds 0 to 19999, with 1 to 8 nodes; prints what breaks
    scripts/dev/simulate --fewest 8 --many 100000 -j 2       100,000 seeds with 8 to 80 nodes in two processes
    scripts/dev/simulate --nodes 4 --min-nodes 3 --faults 2 --kind host-vanishes --kind worker-hangs

What is not given follows from the seed, as in tests/sim.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "scripts" / "lib")]

from sim_story import Story  # noqa: E402

from tests.sim.faults import KINDS  # noqa: E402
from tests.sim.invariants import Violation  # noqa: E402
from tests.sim.world import World, random_settings  # noqa: E402


def settings_from(args):
    """The seed's own settings, with what was asked for instead."""
    given = {"faults": args.faults, "min_nodes": args.min_nodes, "max_restarts": args.max_restarts}
    settings = replace(random_settings(args.seed, args.nodes), kinds=tuple(args.kind))
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def summary(settings, world, outcome):
    """Four lines."""
    cycles = len({cycle for _, cycle in world.training.runs})
    faults = ", ".join(f"{kind} x {n}" for kind, n in sorted(outcome.fired.items())) or "none"
    exits = ", ".join(f"{n} exit with {int(code)}" for code, n in sorted(outcome.exits.items()))
    return (
        f"outcome: code {int(outcome.code)} after {outcome.took_s:.1f} s of virtual time: {outcome.reason}\n"
        f"agents:  {exits} (of {len(world.agents)}; the others were killed)\n"
        f"cycles:  {cycles} ({settings.max_restarts} restarts allowed), {len(world.coordinators)} coordinator(s)\n"
        f"faults:  {faults}"
    )


def run_one(args, seed):
    """What is counted of one seed; a rule that breaks is printed."""
    nodes = args.fewest + seed % (args.nodes + 1 - args.fewest)
    world = World(replace(random_settings(seed, nodes), kinds=tuple(args.kind)))
    counts: Counter[str] = Counter()
    try:
        counts[f"end {int(world.run().code):3}"] += 1
    except Exception as error:  # noqa: BLE001 - a core that raises is a defect, too
        counts["broken"] += 1
        print(f"{type(error).__name__}: seed {seed}, {nodes} nodes: {error}", flush=True)
    counts["not judged to the end"] += world.invariants.forgotten
    takeovers = max(0, len(world.invariants.terms) - 1)
    counts["takeovers"] += takeovers
    counts["jobs with several takeovers"] += takeovers > 1
    counts.update({f"fault {kind}": n for kind, n in world.fired.items()})
    return counts


def _collect_seldom():
    """Halves the time: each world is garbage once it is judged, and little else is."""
    gc.freeze()
    gc.set_threshold(50_000)


def run_many(args):
    """Seeds from `--seed` on, with `--fewest` to `--nodes` nodes each; returns 1 when a rule breaks."""
    total: Counter[str] = Counter()
    with Pool(args.jobs, _collect_seldom) as pool:
        seeds = range(args.seed, args.seed + args.many)
        for number, counts in enumerate(pool.imap_unordered(partial(run_one, args), seeds, chunksize=20), 1):
            total.update(counts)
            if number % 1000 == 0:
                print(f"{number} seeds, {total['broken']} broken", flush=True)
    print(f"{args.many} seeds with {args.fewest} to {args.nodes} nodes")
    for what, count in sorted(total.items()):
        print(f"{count:9}  {what}")
    return min(total["broken"], 1)


def main():
    """Returns 0 when all invariants hold, 1 when one breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, help="how many")
    parser.add_argument("--kind", action="append", default=[], choices=sorted(KINDS), help="only these (repeatable)")
    parser.add_argument("--min-nodes", type=int, help="active nodes")
    parser.add_argument("--max-restarts", type=int)
    parser.add_argument("--many", type=int, default=0, help="how many seeds to run, without their stories")
    parser.add_argument("--fewest", type=int, default=1, help="nodes, with --many [1]")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes, with --many [1]")
    args = parser.parse_args()
    if args.many:
        return run_many(args)
    settings = settings_from(args)
    if not 1 <= settings.min_nodes <= settings.nodes:
        parser.error(f"--min-nodes must be between 1 and --nodes ({settings.nodes})")
    print(
        f"{settings.nodes} nodes x {settings.nproc} workers, {settings.min_nodes} of them active,"
        f" {settings.work_s:g} s of work, a checkpoint every {settings.checkpoint_s:g} s, seed {settings.seed}\n"
    )
    story = Story()
    world = World(settings, story)
    try:
        outcome = world.run()
    except Violation as violation:
        print(f"{story.text()}\n\nINVARIANT BROKEN: {violation}")
        return 1
    print(f"{story.text()}\n\n{summary(settings, world, outcome)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
