"""How much slower steps are with a save into memory each 20 steps, copied to another node: two nodes on loopback."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.harness import Job

_WORKER = str(Path(__file__).with_name("memory_steps_worker.py"))
_FLAGS = ("--ft-checkpoint-interface=lo",)


def _slower(mode, launchers, repeats):
    """In percent, for each pair of blocks."""
    with Job(launchers.ours, life_s=600.0, worker=_WORKER) as job:
        job.start("2", 1, f"{mode} {repeats}", _FLAGS)
        pairs = [job.wait(1, f"pair{number}") for number in range(-2, repeats)]
    return {launchers.ours.name: [100 * (event.at_s - 1) for (event,) in pairs[2:]]}


FIGURES = [
    Figure("memory-steps", "steps with a save into memory each 20, slower by", "%", 2.0, partial(_slower, "device")),
]
