"""In-process restart, the short way: the whole of `main` is wrapped, and begins anew after a fault on any rank.

Every iteration makes its own process group, model and optimizer and loads the newest checkpoint, so nothing that a
fault may have spoiled is used again. A rank that is lost is gone for good: the others go on without it.
"""

from __future__ import annotations

import torch.distributed as dist
from training import Trainer, backend, inject, options, say

from nvrx_slurm import inprocess


@inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=10))
def main(call: inprocess.CallWrapper) -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(backend())  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of this iteration
    say(f"iteration {call.iteration}: {dist.get_world_size()} ranks")

    trainer = Trainer()
    trainer.resume(args.checkpoint)
    trainer.distribute()
    if call.iteration == 0:
        inject(args)
    while trainer.step < args.steps:
        trainer.train_step(args.step_time)
        if dist.get_rank() == 0 and (trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps):
            with call.atomic():  # a restart waits until the checkpoint is complete
                trainer.save(args.checkpoint)

    say(trainer.summary())
    del trainer.ddp  # the last to hold the process group would wait for its threads, see ../ddp.py
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
