"""Starts one worker by `node.workers.workers` and stops it some turns of the event loop after what its start waits for.

python stop_driver.py DIRECTORY TURNS: prints a line for each number of turns below TURNS: exits told, workers left.
TURNS 0: the lease of the node is over; prints the same and why the worker was not started.
"""

import asyncio
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.node.workers.worker_spec import WorkerContract, WorkerSpec
from nvrx_slurm.node.workers.workers import Workers
from nvrx_slurm.types import History, Node, Plan

BOUND_S = 150.0
PLAN = Plan(1, 0, History(0), 0, 1, 1, "127.0.0.1", 1, 0, 0)


async def stop_after(turns, directory, lease=None):
    """How many exits the agent hears of, how many workers are alive then, and the message of the first exit."""
    spec = WorkerSpec(["sleep", "60"], WorkerContract("", "", ""), {}, 9, lambda local_rank: 0, monitored=False)
    node = Node("0-x", 0, "here", "127.0.0.1", 1)
    parts = SimpleNamespace(node=node, spec=spec, run_dir=RunDir(directory, "1", "r0"))
    exits, told = [], asyncio.Event()

    def post(event):
        exits.append(event)
        told.set()

    workers = Workers(cast(NodeJob, parts), Console("test"), post, directory, lease, lambda message: None)
    await workers.start()
    do, settled = workers.handlers(), workers._launcher._settled
    settled.clear()  # a standby is on its way
    do[ag.StartWorkers](ag.StartWorkers(PLAN))
    while not settled._waiters:
        await asyncio.sleep(0)
    settled.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if lease is None:
        do[ag.SignalWorkers](ag.SignalWorkers(signal.SIGTERM))
    await asyncio.wait_for(told.wait(), BOUND_S)
    for _ in range(10):
        await asyncio.sleep(0)
    left = len(workers._alive)
    await workers.close()
    return len(exits), left, exits[0].fault.message if lease else ""


if __name__ == "__main__":
    over = Lease()
    over.until_s = 0.1
    if sys.argv[2] == "0":
        print(*asyncio.run(stop_after(0, Path(sys.argv[1]), over)))
    for number in range(int(sys.argv[2])):
        print(*asyncio.run(stop_after(number, Path(sys.argv[1]))))
