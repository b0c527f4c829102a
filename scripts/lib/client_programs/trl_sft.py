"""TRL's own SFT script, unchanged, on a model of two layers that is made here: `trl_sft.py DIRECTORY`."""

import os
import runpy
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[1])
WORDS = ["the", "a", "job", "node", "rank", "runs", "ends", "fails"]


def prepare(directory):
    """A model, its tokenizer and a data set on disk."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    vocabulary = {word: number for number, word in enumerate(["<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<eos>"
    ).save_pretrained(directory / "model")
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=2, n_head=2)).save_pretrained(
        directory / "model"
    )
    (directory / "data").mkdir(exist_ok=True)
    rows = [{"text": " ".join(WORDS[(number * 7 + place) % 8] for place in range(12))} for number in range(320)]
    (directory / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "ready").touch()


if __name__ == "__main__":
    if os.environ["RANK"] == "0" and not (DIRECTORY / "ready").exists():
        prepare(DIRECTORY)
    while not (DIRECTORY / "ready").exists():
        time.sleep(0.1)
    sys.argv = [
        "sft.py", f"--model_name_or_path={DIRECTORY}/model", f"--dataset_name={DIRECTORY}/data",
        f"--output_dir={DIRECTORY}/out", "--max_steps=20", "--per_device_train_batch_size=4",
        "--report_to=none", "--use_cpu",
        "--logging_steps=1", "--save_steps=100", "--bf16=False", "--disable_tqdm=True",
    ]  # fmt: skip
    runpy.run_module("trl.scripts.sft", run_name="__main__")
    if os.environ["RANK"] == "0":
        from safetensors.torch import load_file

        weights = load_file(DIRECTORY / "out" / "model.safetensors")
        print(f"final weights {sum(one.double().sum().item() for one in weights.values()).hex()}", flush=True)
