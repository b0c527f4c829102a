"""In-process restart with reserve ranks, health checks, and what is expensive kept from one try to the next.

* `Tree` lets at most `--active` ranks train (and `--per-host` on each host); the others wait, warm, and take over the
  place of a rank that is lost. With fewer than `--least` healthy ranks the run ends.
* The model is built once per process and is used again. What a collective may have spoiled is not: after a fault the
  weights come from a snapshot in memory (of the rank that has the newest), from the checkpoint only if nobody has one.
* A rank whose GPU is broken, or that raised too often, leaves instead of failing again and again.
* Each step is reported by `ping`, so that a training that goes round in circles is noticed too.
"""

from __future__ import annotations

import copy
import datetime
import socket
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
from training import Trainer, backend, device, inject, options, say, share

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess.health_check import CudaHealthCheck, FaultCounter
from nvrx_slurm.inprocess.rank_assignment import Layer, LayerFlag, Tree


def parse_args() -> Namespace:
    parser = options(__doc__)
    parser.add_argument("--active", type=int, metavar="N", help="ranks that train; the others are the reserve")
    parser.add_argument("--per-host", type=int, metavar="N", help="the same for each host")
    parser.add_argument("--least", type=int, default=1, metavar="N", help="healthy ranks needed (default: %(default)s)")
    parser.add_argument("--snapshot-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--hang-timeout", type=float, default=60.0, metavar="S", help="a step never takes that long")
    return parser.parse_args()


def wrapper(args: Namespace) -> inprocess.Wrapper:
    seconds = datetime.timedelta(seconds=args.hang_timeout)
    tree = Tree(
        [
            Layer(min_ranks=args.least, max_ranks=args.active, key_or_fn="job", flag=LayerFlag.RESERVE),
            Layer(max_ranks=args.per_host, key_or_fn=lambda _: socket.gethostname(), flag=LayerFlag.RESERVE),
        ]
    )
    gpu = [CudaHealthCheck(timeout=seconds)] if torch.cuda.is_available() else []
    return inprocess.Wrapper(
        rank_assignment=tree,
        initialize=inprocess.initialize.RetryController(max_iterations=10),
        health_check=inprocess.Compose(*gpu, FaultCounter(max_rank_faults=3)),
        soft_timeout=seconds,
        hard_timeout=1.5 * seconds,
        progress_watchdog_interval=min(seconds / 5, datetime.timedelta(seconds=1)),
        monitor_process_interval=min(seconds / 5, datetime.timedelta(seconds=1)),
        monitor_thread_interval=min(seconds / 5, datetime.timedelta(seconds=1)),
    )


class Workspace:
    """What a process keeps from one iteration to the next."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.initial = copy.deepcopy(self.trainer.state_dict())
        self.snapshot: dict[str, Any] | None = None

    def keep(self) -> None:
        """Take a snapshot, between two steps. It replaces the one before only when it is complete."""
        self.snapshot = copy.deepcopy(self.trainer.state_dict())

    def restore(self, args: Namespace) -> None:
        """All ranks together: the newest snapshot of any rank, else the checkpoint."""
        mine = torch.tensor(-1 if self.snapshot is None else self.snapshot["step"], device=device())
        steps = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(steps, mine)
        newest = max(range(len(steps)), key=lambda rank: int(steps[rank]))
        if int(steps[newest]) < 0:
            self.trainer.load_state_dict(copy.deepcopy(self.initial))
            self.trainer.resume(args.checkpoint)
            return
        self.snapshot = share(self.snapshot, src=newest)
        assert self.snapshot is not None
        self.trainer.load_state_dict(copy.deepcopy(self.snapshot))
        say(f"continued from the snapshot of step {self.trainer.step}")


def train(args: Namespace, workspace: Workspace, call: inprocess.CallWrapper) -> None:
    dist.init_process_group(backend())
    say(f"iteration {call.iteration}: {dist.get_world_size()} ranks")
    with call.disable_hang_protection():  # loading may take long
        workspace.restore(args)
    trainer = workspace.trainer
    trainer.distribute()
    if call.iteration == 0:
        inject(args)
    while trainer.step < args.steps:
        trainer.train_step(args.step_time)
        call.ping()
        if trainer.step % args.snapshot_every == 0:
            workspace.keep()
        if dist.get_rank() == 0 and (trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps):
            with call.atomic():
                trainer.save(args.checkpoint)

    say(trainer.summary())
    del trainer.ddp
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parse_args()
    wrapper(args)(train)(args, Workspace())


if __name__ == "__main__":
    main()
