"""A training in the shape of Megatron-LM's asynchronous save: NVRx writes distributed checkpoints beside the steps.

NVRx asks torch for a CUDA device. Where there is none, this script pretends one: the CPU. Its writers, which are
spawned, import this file too and pretend the same.
"""

import copy
import inspect
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch import nn
from torch.distributed import checkpoint as dcp

PRETENDED = {
    "synchronize": lambda *_: None,
    "set_device": lambda *_: None,
    "device_count": lambda: 1,
    "current_device": lambda: torch.device("cpu"),
}
really_empty = torch.empty
if not torch.cuda.is_available():
    for name, pretended in PRETENDED.items():
        setattr(torch.cuda, name, pretended)
    torch.empty = lambda *shape, device=None, **more: really_empty(*shape, **more)

PLACE = pathlib.Path(sys.argv[1])
STEPS, EVERY, STEP_S = int(sys.argv[2]), 5, 0.05


def begin_save(queue, step, model, optimizer):
    """Give the state of `step` to the writer; the folder gets its name when all ranks are done."""
    # NVRx copies what is on a device; what is on the CPU would change while it is written
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    beside = PLACE / f".{step}"
    if dist.get_rank() == 0:
        beside.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    writer = filesystem_async.FileSystemWriterAsync(beside, thread_count=1)
    planned = state_dict_saver.save_state_dict_async_plan(state, writer, None, 0, planner=dcp.DefaultSavePlanner())
    function, preload, words = writer.get_save_function_and_args()

    def finish():
        state_dict_saver.save_state_dict_async_finalize(*planned[:3])
        if dist.get_rank() == 0 and not (PLACE / str(step)).exists():
            beside.rename(PLACE / str(step))
        dist.barrier()

    print(f"rank {dist.get_rank()} writes {step}", flush=True)
    queue.schedule_async_request(core.AsyncRequest(function, words, [finish], preload_fn=preload))


def newest():
    """The step of the newest finished save, 0 where there is none."""
    return max((int(one.name) for one in PLACE.glob("[0-9]*")), default=0)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    client = RankMonitorClient()
    client.init_workload_monitoring()
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    first = [newest()]
    dist.broadcast_object_list(first)
    if start := first[0]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=PLACE / str(start))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert state["step"] == start
        print(f"continued from {start}", flush=True)
    is_known = "cpu_shm_mode" in inspect.signature(core.AsyncCallsQueue).parameters
    queue = core.AsyncCallsQueue(**{"cpu_shm_mode": True} if is_known else {})
    for step in range(start + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.send_heartbeat()
        time.sleep(STEP_S)
        for call in queue.maybe_finalize_async_calls():
            print(f"rank {dist.get_rank()} saved by call {call}", flush=True)
        if step % EVERY == 0 and not queue.get_num_unfinalized_calls():
            begin_save(queue, step, model, optimizer)
    queue.close()
    client.shutdown_workload_monitoring()
    if dist.get_rank() == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        print(f"the newest save is {newest()}; final {weights.double().sum().item().hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
