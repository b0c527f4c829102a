"""A training in the shapes of NVRx's inprocess examples: basic, advanced (a Tree with a reserve), nested (callbacks).

`--fault raise`: the last active rank raises in the first iteration. The steps are slow enough to kill a rank from
outside.
"""

import argparse
import datetime
import os
import time

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

STEPS = 40
SECONDS = datetime.timedelta(seconds=1)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=["basic", "advanced", "nested"])
    parser.add_argument("--fault", default="")
    return parser.parse_args()


def wrapper(shape):
    common = {
        "soft_timeout": 10 * SECONDS,
        "hard_timeout": 15 * SECONDS,
        "heartbeat_timeout": 10 * SECONDS,
        "progress_watchdog_interval": SECONDS,
        "monitor_thread_interval": SECONDS,
        "monitor_process_interval": SECONDS,
    }
    if shape == "basic":
        store = {"timeout": 60 * SECONDS}
        return inprocess.Wrapper(
            store_kwargs=store, health_check=inprocess.health_check.CudaHealthCheck(timeout=10 * SECONDS), **common
        )
    if shape == "advanced":
        Layer, LayerFlag = inprocess.rank_assignment.Layer, inprocess.rank_assignment.LayerFlag
        return inprocess.Wrapper(
            initialize=inprocess.initialize.RetryController(max_iterations=4, min_world_size=2),
            abort=inprocess.Compose(inprocess.abort.AbortTransformerEngine(), inprocess.abort.AbortTorchDistributed()),
            finalize=inprocess.finalize.ThreadedFinalize(timeout=10 * SECONDS, fn=print, args=("finalized",)),
            health_check=inprocess.Compose(inprocess.health_check.FaultCounter(max_rank_faults=2)),
            rank_assignment=inprocess.rank_assignment.Tree(
                [Layer(min_ranks=1, max_ranks=3, key_or_fn="root", flag=LayerFlag.RESERVE)]
            ),
            **common,
        )
    nested = inprocess.nested_restarter
    return inprocess.Wrapper(
        initialize=nested.NestedRestarterHandlingCompleted(),
        abort=inprocess.Compose(inprocess.abort.AbortTorchDistributed(), nested.NestedRestarterHandlingStarting()),
        completion=nested.NestedRestarterFinalized(),
        terminate=nested.NestedRestarterAborted(),
        **common,
    )


def train(args, call_wrapper: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    print(f"iteration {call_wrapper.iteration} rank {rank} of {size}", flush=True)
    weight = torch.zeros(())
    for step in range(1, STEPS + 1):
        gradient = torch.tensor(float(step))
        dist.all_reduce(gradient)
        weight += gradient / size
        call_wrapper.ping()
        if rank == 0:
            print(f"step {step}", flush=True)
        if args.fault == "raise" and call_wrapper.iteration == 0 and step == 10 and rank == size - 1:
            raise RuntimeError("as asked")
        time.sleep(0.05)
    dist.barrier()
    if rank == 0:
        print(f"final {weight.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")
    given = parse_args()
    wrapper(given.shape)(train)(given)
