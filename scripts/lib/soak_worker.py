"""A rank of `scripts/dev/soak`: writes numbered lines, beats, saves, and holds a lock that a second one would notice.

soak_worker.py DIRECTORY: `DIRECTORY/stop` ends it well, `DIRECTORY/raise.RANK` with an exception.
"""

import fcntl
import json
import os
import sys
import time
from pathlib import Path

from nvrx_slurm.fault_tolerance import RankMonitorClient

_SAVE_EVERY = 40
_STEP_S = 0.025


def main():
    """Steps until somebody says stop."""
    place, rank = Path(sys.argv[1]), os.environ["RANK"]
    lock = open(place / f"lock.{rank}", "w")  # noqa: SIM115 - for as long as this process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (place / f"twice.{rank}.{os.getpid()}").write_text(f"rank {rank} runs already\n")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    saved, step = place / f"saved.{rank}", 0
    if saved.exists():
        step = int(saved.read_text() or 0)
    first = step
    while not (place / "stop").exists():
        step += 1
        time.sleep(_STEP_S)
        client.send_heartbeat()
        print(f"rank {rank} step {step} pid {os.getpid()}", flush=True)
        if (wish := place / f"raise.{rank}").exists():
            wish.unlink()
            raise RuntimeError("soak: so it was asked")
        if step % _SAVE_EVERY == 0:
            client.start_section("checkpointing")
            _write(saved, str(step))
            client.end_section("checkpointing")
        _write(place / f"progress.{rank}", json.dumps([step - first, os.getpid(), int(os.environ["NVRX_CYCLE"])]))
    client.shutdown_workload_monitoring()


def _write(path, text):
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


main()
