"""A user's script that imports torch as its first statement; the figures `warm-*` start it, see `worker.py`.

It says "imported", makes a step of a small model with AdamW, says "stepped", then idles.
"""

import os
import time

import torch


def tell(what, at_s):
    """One short line to the harness."""
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, f"{what} {os.environ['RANK']} {os.getpid()} {at_s:.6f}\n".encode())
    os.close(fd)


tell("imported", time.monotonic())
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).sum().backward()
optimizer.step()
tell("stepped", time.monotonic())
time.sleep(float(os.environ["BENCH_LIFE_S"]))
