"""A DDP loop without our client, in which rank 0 pauses once while the others wait: `pauses.py KIND DIRECTORY`."""

import os
import sys
import time

import torch
import torch.distributed as dist

KIND, DIRECTORY = sys.argv[1:]
PAUSE_S = 25.0


def again(act):
    until_s = time.monotonic() + PAUSE_S
    while time.monotonic() < until_s:
        act()


def tokenises():
    """In threads of Rust, in one call after another."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = [" ".join(f"w{number * place % 9973}" for place in range(50)) for number in range(2000)]
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    again(lambda: tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=2000, show_progress=False)))


def maps():
    """By processes of `datasets`."""
    import datasets

    def one(row):
        again(lambda: sum(range(10_000)))
        return row

    datasets.Dataset.from_dict({"index": [0, 1]}).map(one, num_proc=2, load_from_cache_file=False)


def compiles():
    """New code each time, by inductor and the C++ compiler."""
    import torch._dynamo

    def new():
        torch._dynamo.reset()
        torch._inductor.config.force_disable_caches = True
        torch.compile(torch.nn.Sequential(*[torch.nn.Linear(8, 8), torch.nn.GELU()] * 4))(torch.ones(2, 8))

    again(new)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 41):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 30 and dist.get_rank() == 0:
            os.chdir(DIRECTORY)
            {each.__name__: each for each in (tokenises, maps, compiles)}[KIND]()
    dist.barrier()
    os._exit(0)  # on a loaded machine gloo's thread and Python's end may wait for each other


if __name__ == "__main__":
    main()
