"""How long a save into the keeper's memory blocks, beside a bare copy and `torch.save` into a file system in memory.

    python -m benchmarks.checkpoint_memory [--gb 1] [--repeats 9]

The bare copy goes into tensors that were written before. Samples are taken in turns, medians and best are shown. The
first two saves, which make the memory, are shown alone. The keeper has made its checksum before the next sample begins.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median

import torch

from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import messages, rank

_FLOAT_BYTES = 4
_STATES = {"1 tensor": 1, "300 tensors": 300, "10,000 tensors": 10_000}
State = dict[str, torch.Tensor]


def main():
    """Prints one row for each state, as Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in ranks of a node with several
    print(f"{args.gb:g} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print("| state | first two saves | bare copy | save | ratio of medians | of best | torch.save | load |")
    print("|---|---|---|---|---|---|---|---|")
    for iteration, (name, count) in enumerate(_STATES.items()):
        each = int(args.gb * 1e9 / _FLOAT_BYTES / count)
        state = {str(index): torch.randn(each) for index in range(count)}
        print(f"| {name} | {_row(state, args.repeats, 1000 * iteration)} |", flush=True)


def _row(state, repeats, first):
    copy = {name: one.clone() for name, one in state.items()}
    iterations = iter(range(first, first + 1000))
    file = Path(f"/dev/shm/nvrx-bench-{os.getpid()}.pt")

    def bare():
        for name, one in state.items():
            copy[name].copy_(one)

    def save():
        assert checkpoint.save(state, next(iterations))

    def to_file():
        torch.save(state, file)

    firsts = []
    for _ in range(2):
        firsts.append(_took(save))
        _until_checked()
    samples = {"bare": [], "save": [], "file": []}
    try:
        for _ in range(repeats):
            samples["bare"].append(_took(bare))
            samples["save"].append(_took(save))
            _until_checked()
            samples["file"].append(_took(to_file))
    finally:
        file.unlink(missing_ok=True)
    load_s = _took(lambda: checkpoint.load(state))
    middle = {name: median(times) for name, times in samples.items()}
    ratio, best = middle["save"] / middle["bare"], min(samples["save"]) / min(samples["bare"])
    shown = [f"{firsts[0]:.2f}, {firsts[1]:.2f} s", f"{middle['bare']:.3f} s", f"{middle['save']:.3f} s"]
    return " | ".join([*shown, f"{ratio:.2f}", f"{best:.2f}", f"{middle['file']:.2f} s", f"{load_s:.2f} s"])


def _took(what):
    began_s = time.perf_counter()
    what()
    return time.perf_counter() - began_s


def _until_checked():
    newest = checkpoint.available()
    assert newest is not None
    os.close(rank._keeper.ask(messages.AskSaved((0, newest)), messages.Saved)[1])


if __name__ == "__main__":
    main()
