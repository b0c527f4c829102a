"""A user's script that begins with the import of transformers; the figure `warm-transformers` starts it."""

import os
import time

from transformers import Trainer, TrainingArguments  # noqa: F401

with open(os.environ["BENCH_FIFO"], "w") as fifo:
    fifo.write(f"imported {os.environ['RANK']} {os.getpid()} {time.monotonic():.6f}\n")
time.sleep(float(os.environ["BENCH_LIFE_S"]))
