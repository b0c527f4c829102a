"""A data-parallel training script that survives restarts; copy it and put your model in.

What makes it restartable, and what to keep when you change it:

* the state of the training is (model, optimizer, step), all of it is in the checkpoint, and the batch of a step is
  a pure function of (seed, step, rank). So a run that was stopped and resumed ends bitwise like one that never was
  (same world size, on CPU; on GPUs as far as NCCL's reductions are deterministic);
* a checkpoint appears whole or not at all, and one that is damaged nevertheless is skipped for the one before;
* the script starts the same way the first time and after every fault: join, resume, train;
* before the time limit (or a preemption) all ranks save the same step and end well; the next life of the job, requeued
  or submitted anew, goes on from there;
* SIGTERM is left alone: the launcher decides when the processes stop.

Hangs are noticed by heartbeats here, one per step; `ddp_sections.py` is the same training with sections instead.

Run it with `nvrx-run --nproc-per-node 2 examples/ddp.py --checkpoint-dir ckpt`, or with torchrun, or by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import time
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

FEATURES, HIDDEN = 32, 64
KEEP_CHECKPOINTS = 2  # the newest, and one to fall back on should it turn out damaged
ASK_EVERY = 5  # steps between two looks at whether the job is about to end; each look is a collective call


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Deterministic, restartable DDP training on made-up data.")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step (default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="shared by all nodes")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--memory-every", type=int, metavar="STEPS", help="also keep the state in memory that outlives this process"
    )
    parser.add_argument(
        "--step-time", type=float, default=0.0, metavar="S", help="pretend each step computes this long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank (default: %(default)s)")
    parser.add_argument(
        "--learn-timeouts", action="store_true", help="calculate the timeouts from what is seen; kept in the checkpoint"
    )
    parser.add_argument(
        "--progress-file", metavar="PATH", help="keep '<step> <pid>' in PATH.<rank>, for fault injectors"
    )
    return parser.parse_args()


def say(text: str) -> None:
    """Print at once from rank 0: a killed process does not flush."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def make_deterministic(seed: int) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA matmuls refuse deterministic mode
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)


class Heartbeats:
    """The rank monitor that kills this process when its heartbeats stop; nothing where no launcher provides one."""

    def __init__(self, learns: bool) -> None:
        self.client = None
        self.learns = learns
        self.checkpoints = 0  # written since the start
        self.resumed = False
        if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
            say("no rank monitor here (not started by nvrx-run): hangs go unnoticed")
            return
        from nvrx_slurm.fault_tolerance import RankMonitorClient

        self.client = RankMonitorClient()
        self.client.init_workload_monitoring()

    def section(self, name: str) -> AbstractContextManager:
        """A part of the training; heartbeats do not tell them apart."""
        return nullcontext()

    def after_step(self) -> None:
        if self.client:
            self.client.send_heartbeat()  # its timeout must also cover the slowest checkpoint

    def should_stop(self) -> bool:
        """All ranks together, after each step: whether it is time to save and leave. The same answer on all of them."""
        return self.client is not None and self.client.should_stop_together(every=ASK_EVERY)

    def before_checkpoint(self) -> None:
        """All ranks together: new timeouts, from the longest times of any rank so far."""
        if self.client and self.learns and self.checkpoints:  # the first one was not seen yet, and it may take longest
            self.client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        self.checkpoints += 1

    def state_dict(self) -> dict:
        """The timeouts learned so far: plain numbers, the same on all ranks."""
        return self.client.state_dict() if self.client else {}

    def load_state_dict(self, state: dict) -> None:
        self.resumed = True
        if self.client and self.learns and state:
            self.client.load_state_dict(state)

    def close(self) -> None:
        if self.client:
            self.client.shutdown_workload_monitoring()


def make_batch(seed: int, step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pure function of its arguments: with real data, derive the sample indices like this."""
    generator = torch.Generator().manual_seed(((seed * 1_000_003 + step) * 1_000_003 + rank + 1) % 2**63)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, inputs.cumsum(dim=1).sin().mean(dim=1, keepdim=True)


class Trainer:
    """All state of the training, and how one step changes it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.step = args, device, 0
        self.model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def distribute(self) -> None:
        """Wrap the (restored) model for data parallelism.

        DDP lays its gradient buckets out anew after the first backward pass it sees, and the layout decides in which
        order more than two ranks' gradients are added. One pass that is thrown away makes the first step of a
        resumed run add them like the same step of a run that never stopped.
        """
        self.ddp = DistributedDataParallel(self.model)
        self.loss(self.step, dist.get_rank()).backward()
        self.optimizer.zero_grad()

    def loss(self, step: int, rank: int) -> torch.Tensor:
        inputs, targets = (t.to(self.device) for t in make_batch(self.args.seed, step, rank, self.args.batch_size))
        return nn.functional.mse_loss(self.ddp(inputs), targets)

    def train_step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.step, dist.get_rank())
        loss.backward()
        self.optimizer.step()
        time.sleep(self.args.step_time)
        self.step += 1
        return loss.detach()

    def state_dict(self) -> dict:
        return {"step": self.step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @torch.no_grad()
    def summary(self) -> str:
        """The outcome as one comparable line, from the state alone: a run resumed at its last step prints it too."""
        inputs, targets = (t.to(self.device) for t in make_batch(self.args.seed, -1, -1, self.args.batch_size))
        loss = nn.functional.mse_loss(self.model(inputs), targets).item()
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode() + bytes(tensor.cpu().flatten().view(torch.uint8).tolist()))
        return f"final step {self.step} loss {loss.hex()} weights sha256={digest.hexdigest()}"


def save_checkpoint(directory: Path, state: dict) -> None:
    """Write beside the final name, make it durable, then rename: no reader ever sees half a checkpoint."""
    temporary, final = directory / ".incoming.tmp", directory / f"step_{state['step']:08d}.pt"
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(final)
    directory_fd = os.open(directory, os.O_RDONLY)  # the rename itself must survive a power cut, too
    os.fsync(directory_fd)
    os.close(directory_fd)
    for old in sorted(directory.glob("step_*.pt"))[:-KEEP_CHECKPOINTS]:
        old.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict:
    """Raises unless the file is whole: torch.load alone would not notice a flipped bit, the zip's checksums do."""
    content = io.BytesIO(path.read_bytes())
    with zipfile.ZipFile(content) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    content.seek(0)
    return torch.load(content, map_location="cpu", weights_only=True)


def load_newest_checkpoint(directory: Path) -> dict | None:
    for path in sorted(directory.glob("step_*.pt"), reverse=True):
        try:
            return load_checkpoint(path)
        except Exception as error:  # a damaged file can fail in any way, and an older one is still better than none
            print(f"warning: skipping checkpoint {path}: {error}", file=sys.stderr, flush=True)
    return None


def resume(trainer: Trainer, monitor: Heartbeats, directory: Path, device: torch.device) -> None:
    """Load the newest valid checkpoint. Rank 0 chooses it for all: on a shared file system others may see it later."""
    state = None
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        state = load_newest_checkpoint(directory)
    chosen = torch.tensor(state["step"] if state else 0, device=device)
    dist.broadcast(chosen, src=0)
    if chosen == 0:
        return
    state = state or load_checkpoint(directory / f"step_{int(chosen):08d}.pt")
    trainer.load_state_dict(state)
    monitor.load_state_dict(state.get("timeouts", {}))
    say(f"resumed from step {trainer.step}")


def save_in_memory(trainer: Trainer, monitor: Heartbeats) -> None:
    """Each rank saves its own state."""
    from nvrx_slurm import checkpoint

    checkpoint.save(trainer.state_dict() | {"timeouts": monitor.state_dict()}, trainer.step)


def resume_from_memory(trainer: Trainer, monitor: Heartbeats) -> bool:
    """The newest state that all ranks have there: a crash has cost a few steps only. A lost node has lost it."""
    from nvrx_slurm import checkpoint

    found = checkpoint.load()
    if found is None:
        return False
    state, _ = found
    trainer.load_state_dict(state)
    monitor.load_state_dict(state["timeouts"])
    say(f"resumed from step {trainer.step}, in memory")
    return True


def note_progress(prefix: str, step: int) -> None:
    path = f"{prefix}.{dist.get_rank()}"
    Path(path + ".tmp").write_text(f"{step} {os.getpid()}\n")
    os.replace(path + ".tmp", path)


def train(trainer: Trainer, args: argparse.Namespace, monitor: Heartbeats) -> bool:
    """Whether it came to the end; False: it was told to stop early, and has saved what it had."""
    while trainer.step < args.steps:
        with monitor.section("step"):
            loss = trainer.train_step()
        monitor.after_step()
        if args.progress_file:
            note_progress(args.progress_file, trainer.step)
        stop = trainer.step < args.steps and monitor.should_stop()
        if args.memory_every and trainer.step % args.memory_every == 0:
            save_in_memory(trainer, monitor)
        if stop or trainer.step % args.checkpoint_every == 0 or trainer.step == args.steps:
            with monitor.section("checkpointing"):
                dist.all_reduce(loss)
                monitor.before_checkpoint()
                if dist.get_rank() == 0:
                    save_checkpoint(args.checkpoint_dir, trainer.state_dict() | {"timeouts": monitor.state_dict()})
            say(f"step {trainer.step} loss {loss.item() / dist.get_world_size():.6f}")
        if stop:
            return False
    return True


@record  # hands an exception's traceback to the launcher, which prints the first one of all ranks last
def main(monitor_class: type[Heartbeats] = Heartbeats) -> None:
    args = parse_args()
    make_deterministic(args.seed)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    monitor = monitor_class(args.learn_timeouts)

    trainer = Trainer(args, device)
    with monitor.section("setup"):
        if not (args.memory_every and resume_from_memory(trainer, monitor)):
            resume(trainer, monitor, args.checkpoint_dir, device)
        trainer.distribute()
    finished = train(trainer, args, monitor)
    say(
        trainer.summary() if finished else f"stopped early at step {trainer.step}, as told; the next life goes on there"
    )

    # DDP first: were it the last to hold the group, its destructor would keep the GIL while it waits for a gloo thread
    # that needs the GIL to release our loss tensor, and the finished process would hang (seen with torch 2.13).
    del trainer.ddp
    dist.destroy_process_group()
    monitor.close()  # last, so that a hang until here is still noticed


if __name__ == "__main__":
    main()
