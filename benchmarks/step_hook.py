"""What the hook that counts steps costs for each step: `python -m benchmarks.step_hook`.

Median of batches, less that of a function that does nothing, called in the same way. Exit code 1: more than TARGET_US.
"""

import os
import sys
import time
from pathlib import Path
from statistics import median

import torch

import nvrx_slurm

sys.path.insert(0, str(Path(nvrx_slurm.__file__).with_name("warm")))  # it is no part of a package where it runs
import steps  # noqa: E402

BATCH, BATCHES, TARGET_US = 100, 5000, 1.0


def batch_us(hook, optimizer):
    """Of one call, as torch makes them: two frames above the hook."""

    def step():
        hook(optimizer, (), {})

    def many():
        for _ in range(BATCH):
            step()

    before_ns = time.perf_counter_ns()
    many()
    return (time.perf_counter_ns() - before_ns) / BATCH / 1000


def main():
    """Print the figure."""
    words = memoryview(bytearray(8 * 6)).cast("q")
    optimizer = torch.optim.AdamW(torch.nn.Linear(8, 8).parameters())
    hook = steps.counter(words, os.getpid())
    samples = [(batch_us(hook, optimizer), batch_us(lambda *_: None, optimizer)) for _ in range(BATCHES)]
    assert words[1] == BATCH * BATCHES
    cost_us = median(mine for mine, _ in samples) - median(none for _, none in samples)
    print(f"{cost_us:.2f} us for each step, at most {TARGET_US}; load {os.getloadavg()[0]:.1f}")
    return cost_us > TARGET_US


if __name__ == "__main__":
    sys.exit(main())
