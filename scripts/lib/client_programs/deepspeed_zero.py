"""A training with DeepSpeed on CPU, without our client: `deepspeed_zero.py STAGE DIRECTORY`.

Two groups of parameters, of which one has no weight decay, and gradients of two batches for each step.
"""

import argparse
import os
import time
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed  # noqa: E402
import torch  # noqa: E402

STEPS = 40


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)  # else it is compiled for a minute
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "steps_per_print": 1000}
    config["zero_optimization"] = {"stage": args.stage}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(str(args.dir / "saved"))
    for batch in range(engine.micro_steps, 2 * STEPS):
        number = 2 * batch + torch.distributed.get_rank()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        time.sleep(0.02)  # for a fault to come in time
        if engine.is_gradient_accumulation_boundary() and torch.distributed.get_rank() == 0:
            print(f"step {engine.global_steps}", flush=True)
        if engine.global_steps % 10 == 0 and engine.micro_steps % 2 == 0:
            engine.save_checkpoint(str(args.dir / "saved"))
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=args.stage == 3):
        weights = torch.cat([one.detach().flatten() for one in model.parameters()]).double()
        told = f"final step {engine.global_steps} weights {weights.sum().item().hex()} {weights.norm().item().hex()}"
    if torch.distributed.get_rank() == 0:
        print(told, flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
