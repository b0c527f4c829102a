"""The rank of `benchmarks.stragglers_job`: a training with gloo that sleeps for its work, since ranks share two cores.

stragglers_worker.py SLOW FACTOR LIGHT LIFE_S DIR   rank SLOW works FACTOR times as long, LIGHT half as long (-1: none)
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from nvrx_slurm.fault_tolerance import RankMonitorClient

WORK_S = 0.04


def main(slow, factor, light, life_s, place):
    """Train for `life_s` seconds; then write down ms of work, wait and processor time of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    work_s = WORK_S * {int(slow): float(factor), int(light): 0.5}.get(rank, 1.0)
    steps, over, until_s = [], torch.zeros(1), time.monotonic() + float(life_s)
    cpu_s = time.process_time()
    while not over:
        began_s = time.perf_counter()
        loss = model(torch.ones(16, 64)).sum()
        time.sleep(work_s)
        worked_s = time.perf_counter()
        monitor.start_section("backward")
        loss.backward()
        over[0] = time.monotonic() >= until_s
        dist.broadcast(over, 0)
        monitor.end_section("backward")
        before_s, cpu_s = cpu_s, time.process_time()
        figures = worked_s - began_s, time.perf_counter() - worked_s, cpu_s - before_s
        steps.append([1e3 * one for one in figures])
    monitor.shutdown_workload_monitoring()
    with open(os.path.join(place, f"rank_{rank}.json"), "w") as file:
        json.dump(steps, file)
    dist.destroy_process_group()


main(*sys.argv[1:])
