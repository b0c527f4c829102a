"""A loop with an Accelerator and a RankMonitorClient, as docs/how-to/use-hugging-face.md shows it.

ALONE in the environment: without the client."""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

STEPS = 60


def client():
    if "ALONE" in os.environ:
        return None
    from nvrx_slurm.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    return monitor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    checkpoint = parser.parse_args().checkpoint
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    monitor = client()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    first = 0
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
        first = int((checkpoint / "step").read_text())
    for step in range(first + 1, STEPS + 1):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 2 + accelerator.process_index))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.send_heartbeat()
        accelerator.print(f"step {step}", flush=True)
        time.sleep(0.03)  # for a fault to come in time
        if step % 10 == 0:
            save(accelerator, checkpoint, step)
    whole = [
        one.full_tensor() if hasattr(one, "full_tensor") else one for one in model.parameters()
    ]  # of FSDP's shards
    weights = torch.cat([one.detach().flatten() for one in whole]).double()
    accelerator.print(f"final step {STEPS} weights {weights.sum().item().hex()}", flush=True)
    if monitor:
        monitor.shutdown_workload_monitoring()
    accelerator.end_training()


def save(accelerator, checkpoint, step):
    """All ranks. The folder appears whole, or not at all."""
    beside = checkpoint.with_suffix(".new")
    if accelerator.is_main_process:
        shutil.rmtree(beside, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(beside))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (beside / "step").write_text(str(step))
        former = checkpoint.with_suffix(".old")
        shutil.rmtree(former, ignore_errors=True)
        if checkpoint.exists():
            os.rename(checkpoint, former)
        os.rename(beside, checkpoint)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
