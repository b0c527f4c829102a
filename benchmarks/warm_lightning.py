"""A user's script that begins with the import of lightning; the figure `warm-lightning` starts it."""

import os
import time

import lightning  # noqa: F401

with open(os.environ["BENCH_FIFO"], "w") as fifo:
    fifo.write(f"imported {os.environ['RANK']} {os.getpid()} {time.monotonic():.6f}\n")
time.sleep(float(os.environ["BENCH_LIFE_S"]))
