"""A DDP loop that reads, saves, logs and compiles as real programs do: `torch_ways.py WAY DIRECTORY`.

Each step has its own seed, so a run that was restarted from a checkpoint ends with the same weights.
"""

import os
import sys
import time
from pathlib import Path

WAY = sys.argv[1]
if WAY == "comet":  # it asks to be imported before torch
    import comet_ml

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

STEPS, BATCH = 40, 8
STARTS = ("fork", "spawn", "forkserver")


def sample(index):
    return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Samples(Dataset):
    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, number):
        return sample(self.indices[number])


def batches(way, directory, first):
    """Those of this rank, from step `first` on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = [(step * size + rank) * BATCH + one for step in range(first, STEPS) for one in range(BATCH)]
    if way == "loky":
        from joblib import Parallel, delayed

        found = Parallel(n_jobs=2, backend="loky")(delayed(sample)(number) for number in numbers)
        return torch.stack(found).split(BATCH)
    if way == "datasets":
        import datasets

        table = datasets.Dataset.from_dict({"index": numbers})
        table = table.map(lambda row: {"x": sample(row["index"]).tolist()}, num_proc=2)
        return torch.tensor(table["x"]).split(BATCH)
    if way == "streaming":
        return streamed(directory, numbers)
    context = way if way in STARTS else None
    workers = 2 if context else 0
    return DataLoader(
        Samples(numbers), BATCH, num_workers=workers, persistent_workers=bool(workers), multiprocessing_context=context
    )


def streamed(directory, numbers):
    """From a local copy of all samples, in the order of their numbers."""
    from streaming import MDSWriter, StreamingDataset

    where = directory / "samples"
    if dist.get_rank() == 0 and not (where / "index.json").exists():
        with MDSWriter(out=str(where), columns={"x": "ndarray:float32:16"}, exist_ok=True) as out:
            for number in range(STEPS * BATCH * dist.get_world_size()):
                out.write({"x": sample(number).numpy()})
    dist.barrier()
    table = StreamingDataset(local=str(where), shuffle=False, batch_size=BATCH)
    return torch.stack([torch.tensor(table[number]["x"]) for number in numbers]).split(BATCH)


def network(way):
    if way == "gpt":
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 16)), torch.nn.TransformerEncoder(layer, 2), torch.nn.Flatten()
        )
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))


def tracker(way, directory):
    """A function that logs a loss."""
    if dist.get_rank() or way not in ("tensorboard", "wandb", "comet"):
        return lambda step, loss: None
    if way == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(directory / "board"))
        return lambda step, loss: writer.add_scalar("loss", loss, step)
    if way == "wandb":
        import wandb

        run = wandb.init(mode="offline", dir=str(directory), project="clients")
        return lambda step, loss: run.log({"loss": loss}, step=step)
    experiment = comet_ml.OfflineExperiment(offline_directory=str(directory), project_name="clients")
    return lambda step, loss: experiment.log_metric("loss", loss, step=step)


class Checkpoints:
    """The last whole one, by torch.save; with `dcp` by async_save, which is waited for at the next one."""

    def __init__(self, way, directory, model, optimizer):
        self.dcp, self.directory, self.model, self.optimizer = way == "dcp", directory, model, optimizer
        self.last, self.under_way = directory / "last", None
        self.group = dist.new_group(backend="gloo") if self.dcp else None  # its thread shares no group with the steps

    def load(self):
        if not self.last.exists():
            return 0
        step = int(self.last.read_text())
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.dcp:
            import torch.distributed.checkpoint as dcp

            state["optimizer"] = torch.load(self.directory / f"optimizer{step}", weights_only=True)
            model = {"model": state["model"]}
            dcp.load(model, checkpoint_id=str(self.directory / f"step{step}"))
        else:
            state = torch.load(self.directory / f"step{step}", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return step

    def save(self, step):
        self.finish()
        if self.dcp:
            import torch.distributed.checkpoint as dcp

            if dist.get_rank() == 0:
                torch.save(self.optimizer.state_dict(), self.directory / f"optimizer{step}")
            state, place = {"model": self.model.state_dict()}, str(self.directory / f"step{step}")
            future = dcp.async_save(state, checkpoint_id=place, process_group=self.group)
            self.under_way = future, step
            return
        if dist.get_rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self.directory / f"step{step}")
            self.note(step)
        dist.barrier()

    def finish(self):
        if self.under_way is not None:
            future, step = self.under_way
            self.under_way = None
            future.result()
            dist.barrier()
            if dist.get_rank() == 0:
                self.note(step)

    def note(self, step):
        beside = self.last.with_suffix(".new")
        beside.write_text(str(step))
        os.replace(beside, self.last)


def train(way, directory):
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    torch.manual_seed(0)
    model = network(way)
    model = DistributedDataParallel(torch.compile(model) if way == "compile" else model)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(way, directory, model, optimizer)
    first = checkpoints.load()
    log = tracker(way, directory)
    for step, x in enumerate(batches(way, directory, first), first + 1):
        torch.manual_seed(step)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(step, loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.03)  # for a fault to come in time
        if step % 10 == 0:
            checkpoints.save(step)
    checkpoints.finish()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()]).double()
    if dist.get_rank() == 0:
        print(f"final step {STEPS} weights {weights.sum().item().hex()} {weights.norm().item().hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(WAY, Path(sys.argv[2]))
