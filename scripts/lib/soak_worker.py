"""A rank of `scripts/dev/soak`: trains with all others, beats, saves into memory and to disk, and writes lines.

soak_worker.py DIRECTORY: `DIRECTORY/stop` ends it well, `DIRECTORY/raise.RANK` with an exception. It holds a lock that
a second one would notice.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nvrx_slurm import checkpoint
from nvrx_slurm.fault_tolerance import RankMonitorClient

MEMORY_EVERY, _DISK_EVERY = 4, 40
SIZE = 10_000
_STEP_S = 0.025


def first():
    """The state before the first step."""
    return torch.arange(SIZE)


def stepped(state, step, world):
    """What any number of faults must not change: the state after this step."""
    return (31 * state + step * world) % 1_000_003


def told(state):
    """A number that stands for it."""
    return int((state * torch.arange(1, SIZE + 1)).sum())


def main():
    """Steps until somebody says stop."""
    place, rank, cycle = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["NVRX_CYCLE"])
    lock = open(place / f"lock.{rank}", "w")  # noqa: SIM115 - for as long as this process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (place / f"twice.{rank}.{os.getpid()}").write_text(f"rank {rank} runs already\n")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    dist.init_process_group("gloo")
    state, step, source = _loaded(place / "saved.pt")
    print(f"rank {rank} begins {cycle} {step} {source} {told(state)}", flush=True)
    begun = step
    while True:
        step += 1
        time.sleep(_STEP_S)
        votes = torch.tensor([step, (place / "stop").exists()])
        dist.all_reduce(votes)
        state = stepped(state, step, dist.get_world_size())
        if step % MEMORY_EVERY == 0:
            checkpoint.save({"state": state}, step)
        client.send_heartbeat()
        print(f"rank {rank} step {step} pid {os.getpid()} state {told(state)}", flush=True)
        if (wish := place / f"raise.{rank}").exists():
            wish.unlink()
            raise RuntimeError("soak: so it was asked")
        if step % _DISK_EVERY == 0 and rank == "0":
            client.start_section("checkpointing")
            torch.save((state, step), place / f"saved.{os.getpid()}")
            (place / f"saved.{os.getpid()}").replace(place / "saved.pt")
            client.end_section("checkpointing")
        _write(place / f"progress.{rank}", json.dumps([step - begun, os.getpid(), cycle]))
        if votes[1]:
            break
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


def _loaded(disk):
    """State, step, and from where."""
    found = checkpoint.load()
    if found is not None:
        return found[0]["state"], found[1], "memory"
    here = [torch.load(disk) if dist.get_rank() == 0 and disk.exists() else (first(), 0)]
    dist.broadcast_object_list(here)  # another rank may read it a moment later, when it is newer
    return *here[0], "disk"


def _write(path, text):
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    main()
