"""The training script of scripts/dev/gpu-trial: tells what it did, one JSON line each on stdout. Argument: MODE.

crash    train; in cycle 0 the highest rank waits to be killed
hang     train with heartbeats; in cycle 0 the highest rank stops before a collective
wrapped  train under inprocess.Wrapper; FAULT (exception, sleep, stop) of the highest rank in iteration 0
count    say where the rank is, and end
"""

import json
import os
import signal
import sys
import time

BEFORE = "torch" in getattr(sys.meta_path[0], "parked", ())  # imported by the template
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

IMPORTED_S = time.monotonic()
RANK, LOCAL, SIZE, CYCLE = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NVRX_CYCLE"))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", LOCAL % torch.cuda.device_count()) if CUDA else torch.device("cpu")
FAULTY = RANK == SIZE - 1
MEMORY_BYTES = (1 << 30) if CUDA else (1 << 22)


def say(what, **more):
    place = {"rank": RANK, "cycle": CYCLE, "pid": os.getpid(), "forked": BEFORE, "at_s": time.monotonic()}
    print(json.dumps({"say": what, **place, **more}), flush=True)


def train(step_done, steps):
    """A model that takes some device memory; an all-reduce in each step."""
    ballast = torch.zeros(MEMORY_BYTES // 4, device=DEVICE)
    model = torch.nn.Linear(256, 256, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.randn(32, 256, device=DEVICE)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if CUDA:
            torch.cuda.synchronize()
        if step == 0:
            say("step", imported_s=IMPORTED_S, backend=dist.get_backend())
        step_done(step)
    return ballast


def init():
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo")


def monitored(hangs):
    from nvrx_slurm.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    init()

    def step_done(step):
        client.send_heartbeat()
        if CYCLE == 0 and step == 2 and FAULTY:
            say("faulty")
            time.sleep(600 if hangs else 120)

    train(step_done, 5 if CYCLE else 1_000_000)
    client.shutdown_workload_monitoring()


def wrapped(fault):
    from datetime import timedelta

    from nvrx_slurm import inprocess

    seconds = timedelta(seconds=3)

    @inprocess.Wrapper(
        abort=inprocess.abort.AbortTorchDistributed(),
        soft_timeout=seconds,
        hard_timeout=2 * seconds,
        progress_watchdog_interval=timedelta(seconds=0.2),
        monitor_process_interval=timedelta(seconds=0.2),
        monitor_thread_interval=timedelta(seconds=0.2),
        last_call_wait=timedelta(0),
    )
    def run(call: inprocess.CallWrapper):
        size = int(os.environ["WORLD_SIZE"])
        init()
        pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, size - 1, 2)]
        say("entered", iteration=call.iteration, size=size)

        def step_done(step):
            call.ping()
            if CYCLE == call.iteration == 0 and step == 2 and FAULTY:
                say("faulty")
                if fault == "exception":
                    raise RuntimeError("as asked")
                if fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)

        if pairs and int(os.environ["RANK"]) // 2 < len(pairs):
            dist.all_reduce(torch.ones(1, device=DEVICE), group=pairs[int(os.environ["RANK"]) // 2])
        train(step_done, 1_000_000 if call.iteration == 0 else 5)
        say("returned", iteration=call.iteration, size=size)
        dist.destroy_process_group()

    run()


if sys.argv[1] == "count":
    say("here", affinity=sorted(os.sched_getaffinity(0)), devices=torch.cuda.device_count() if CUDA else 0)
elif sys.argv[1] == "wrapped":
    wrapped(sys.argv[2])
else:
    monitored(hangs=sys.argv[1] == "hang")
