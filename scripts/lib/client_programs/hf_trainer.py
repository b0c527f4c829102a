"""A training with the Trainer of transformers and our callback, as docs/how-to/use-hugging-face.md shows it.

ALONE in the environment: without the callback."""

import argparse
import os
import time

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

STEPS = 60


class Config(PretrainedConfig):
    model_type = "tiny"


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
        self.post_init()

    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * 2 * STEPS

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum(0, keepdim=True)}


class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)
        time.sleep(0.03)  # for a fault to come in time


def ours():
    if "ALONE" in os.environ:
        return []
    from nvrx_slurm.huggingface import FaultToleranceCallback

    return [FaultToleranceCallback(calculate_timeouts=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    output_dir = parser.parse_args().output_dir
    torch.set_num_threads(1)
    set_seed(0)  # the Trainer seeds too late for a model that is made before it
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        save_steps=10,
        save_total_limit=2,
        logging_steps=1000,
        report_to=[],
        use_cpu=True,
        dataloader_num_workers=1,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=Model(Config()),
        args=args,
        train_dataset=Data(),
        callbacks=[*ours(), Say()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None)
    if trainer.is_world_process_zero():
        weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).double()
        print(f"final step {trainer.state.global_step} weights {weights.sum().item().hex()}", flush=True)


if __name__ == "__main__":
    main()
