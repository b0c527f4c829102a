"""A fit with the Trainer of Lightning and our callback; `--raises STEP`: rank 1 raises there, once.

ALONE in the environment: without the callback."""

import argparse
import os
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

STEPS = 60


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, _):
        return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 2 * STEPS

    def __getitem__(self, index):
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Say(Callback):
    def __init__(self, raises, once):
        self.raises, self.once = raises, once

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)
        time.sleep(0.03)  # for a fault to come in time
        if trainer.global_rank == 1 and trainer.global_step == self.raises and not self.once.exists():
            self.once.touch()
            raise ArithmeticError(f"an error at step {self.raises}")


def ours(directory):
    if "ALONE" in os.environ:
        return []
    from nvrx_slurm.ptl_resiliency import FaultToleranceCallback

    return [FaultToleranceCallback(autoresume=False, calculate_timeouts=True, exp_dir=directory)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--raises", type=int, default=-1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            *ours(args.dir),
            ModelCheckpoint(args.dir, every_n_train_steps=10, save_last=True),
            Say(args.raises, args.dir / "raised"),
        ],
    )
    model = Model()
    last = args.dir / "last.ckpt"
    trainer.fit(model, torch.utils.data.DataLoader(Data(), batch_size=8), ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        weights = torch.cat([one.detach().flatten() for one in model.parameters()]).double()
        print(f"final step {trainer.global_step} weights {weights.sum().item().hex()}", flush=True)


if __name__ == "__main__":
    main()
