"""Trains two ranks in blocks of 20 steps, with a save into memory and without one; `memory_steps.py` starts it.

MODE PAIRS: a step adds up gradients over gloo, and then waits for its device (it sleeps). "busy": it computes instead.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from nvrx_slurm import checkpoint

_BLOCK = 20  # steps
_DEVICE_S, _FORWARDS = 0.1, 5
_WIDTH, _LAYERS = 1024, 4  # with AdamW: 50 MB


def main(mode, pairs):
    """Tells by how much each block with a save was slower than the one after it: a ratio."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(64, _WIDTH)

    def step():
        optimizer.zero_grad()
        model(inputs[:1]).sum().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()
        if mode == "busy":
            for _ in range(_FORWARDS):
                model(inputs)
        else:
            time.sleep(_DEVICE_S)

    def block(first, saves):
        dist.barrier()
        began_s = time.perf_counter()
        for number in range(_BLOCK):
            step()
            if saves and number == 0:
                assert checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, first)
        dist.barrier()
        return time.perf_counter() - began_s

    for number in range(-2, pairs):
        took_s = [block(number + 2, saves=True), block(number + 2, saves=False)]
        if dist.get_rank() == 0:
            _tell(f"pair{number}", took_s[0] / took_s[1])
    dist.destroy_process_group()


def _tell(what, value):
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, f"{what} {os.environ['RANK']} {os.getpid()} {value:.6f}\n".encode())
    os.close(fd)


main(sys.argv[1], int(sys.argv[2]))
