"""In-process restart under the launcher: the wrapper as long as enough nodes are good, then nvrx-run.

    nvrx-run --restart-policy min-healthy --nnodes 2:3 --nproc-per-node 2 --max-restarts 3 \\
        --ft-rank-heartbeat-timeout 120 examples/inprocess/with_launcher.py --checkpoint /shared/checkpoint.pt

A fault first restarts `train` in the processes that are left. As the launcher counts whole nodes, so does the wrapper:
the ranks of a node that has lost one leave too. When fewer than 2 nodes are good, nvrx-run starts all processes anew.

A hang is found by the wrapper first (`soft_timeout`, `hard_timeout`); the heartbeats of the launcher's rank monitor
are for what the wrapper cannot see, so their timeout must be longer than `hard_timeout` and a restart together.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from training import Trainer, backend, inject, options, say

from nvrx_slurm import inprocess
from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.inprocess.rank_assignment import ActivateAllRanks, FilterCountGroupedByKey, ShiftRanks

NPROC = int(os.environ["LOCAL_WORLD_SIZE"])  # ranks of each node; GROUP_RANK is the node's number


@inprocess.Wrapper(
    initialize=inprocess.initialize.RetryController(max_iterations=10),
    rank_assignment=inprocess.Compose(
        ActivateAllRanks(),
        ShiftRanks(),
        FilterCountGroupedByKey(lambda _: os.environ["GROUP_RANK"], condition=lambda count: count == NPROC),
    ),
    soft_timeout=datetime.timedelta(seconds=30),
    hard_timeout=datetime.timedelta(seconds=45),
    heartbeat_timeout=datetime.timedelta(seconds=20),
)
def train(monitor: RankMonitorClient, call: inprocess.CallWrapper) -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(backend())
    say(f"cycle {os.environ['NVRX_CYCLE']} iteration {call.iteration}: {dist.get_world_size()} ranks")
    trainer = Trainer()
    trainer.resume(args.checkpoint)
    trainer.distribute()
    if call.iteration == 0:
        inject(args)
    while trainer.step < args.steps:
        trainer.train_step(args.step_time)
        monitor.send_heartbeat()
        if dist.get_rank() == 0 and (trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps):
            with call.atomic():
                trainer.save(args.checkpoint)
    say(trainer.summary())
    del trainer.ddp
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()  # once per process: the launcher knows nothing of iterations
    train(monitor)
    monitor.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
