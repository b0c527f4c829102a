"""The training that the examples beside this file make restartable: a small network on made-up data.

The batch of a step is the same whatever the world size: sample i goes to rank i % world size. So a run that lost ranks
on the way learns what a run that lost none does, up to the rounding of sums, and tests can compare the losses.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nvrx_slurm.testing.inject_fault import Fault, inject_fault, maybe_raise_workload_exception

FEATURES, HIDDEN, BATCH = 32, 64, 24


def options(description: str) -> argparse.ArgumentParser:
    """What all examples can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (default: %(default)s)")
    parser.add_argument("--step-time", type=float, default=0.01, metavar="S", help="pretend to compute this long")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="a file that all nodes see")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    faults = parser.add_argument_group("fault injection, in the first try only")
    faults.add_argument("--fault", action="append", choices=[one.name for one in Fault], help="one of these is chosen")
    faults.add_argument("--fault-after", type=float, default=0.5, metavar="S", help="after the first step")
    faults.add_argument("--faults", type=int, default=1, metavar="N", help="so many ranks are hit")
    faults.add_argument("--keep-alive", type=int, default=0, metavar="N", help="never one of the first N ranks")
    faults.add_argument("--fault-seed", type=int, default=0)
    return parser


def inject(args: argparse.Namespace) -> None:
    """On all ranks alike, but not in processes that the launcher has started anew."""
    if not args.fault or os.environ.get("NVRX_CYCLE", "0") != "0":
        return

    def tell() -> None:
        os.write(1, f"rank {dist.get_rank()} pid {os.getpid()} is hit\n".encode())

    faults = [Fault[name] for name in args.fault]
    inject_fault(faults, args.faults, args.keep_alive, args.fault_after, args.fault_seed, tell)


def say(text: str) -> None:
    """Print at once from rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def backend() -> str:
    """NCCL on this rank's GPU, gloo where there is none."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return "nccl"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def share(state: dict[str, Any] | None, src: int) -> dict[str, Any] | None:
    """All ranks together: what rank `src` has."""
    file = io.BytesIO()
    if state is not None and dist.get_rank() == src:
        torch.save(state, file)
    size = torch.tensor(file.tell(), device=device())
    dist.broadcast(size, src)
    if not size:
        return None
    content = torch.zeros(int(size), dtype=torch.uint8)
    if file.tell():
        content[:] = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    content = content.to(device())
    dist.broadcast(content, src)
    return torch.load(io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples of a step: a pure function of it."""
    inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return inputs, inputs.cumsum(dim=1).sin().mean(dim=1, keepdim=True)


class Trainer:
    """All state of the training, and how one step changes it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.step = 0
        self.model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).double().to(device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def distribute(self) -> None:
        """For the process group that there is now."""
        self.ddp: DistributedDataParallel | None = None  # one of an earlier group first lets go of the model
        self.ddp = DistributedDataParallel(self.model)

    def train_step(self, step_time_s: float) -> float:
        """The loss of this rank's share of the batch, as a part of the whole."""
        maybe_raise_workload_exception()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        inputs, targets = (whole[rank::world_size].to(device()) for whole in make_batch(self.step))
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.ddp(inputs), targets, reduction="sum") / BATCH
        (loss * world_size).backward()  # DDP takes the mean over the ranks
        self.optimizer.step()
        time.sleep(step_time_s)
        self.step += 1
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path) -> None:
        """Beside the file, then renamed: nobody ever reads half a checkpoint."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        with beside.open("wb") as file:
            torch.save(self.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

    def resume(self, path: Path) -> None:
        """From the checkpoint that rank 0 sees, if there is one."""
        found = dist.get_rank() == 0 and path.exists()
        state = share(torch.load(path, map_location="cpu", weights_only=True) if found else None, src=0)
        if state is not None:
            self.load_state_dict(state)
            say(f"resumed from step {self.step}")

    @torch.no_grad()
    def summary(self) -> str:
        """The outcome as one line."""
        inputs, targets = (whole.to(device()) for whole in make_batch(-1))
        return f"final step {self.step} loss {nn.functional.mse_loss(self.model(inputs), targets).item():.12f}"
