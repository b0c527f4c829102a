"""A training in the shape of NVRx's fault_tolerance examples: heartbeats, or with --sections three sections."""

import argparse
import contextlib
import os
import pathlib

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
import torch
import torch.distributed as dist
from torch import nn


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--sections", action="store_true")
    parser.add_argument("--steps", type=int, default=80)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()

    @contextlib.contextmanager
    def section(name):
        if args.sections:
            client.start_section(name)
        yield
        if args.sections:
            client.end_section(name)

    with section("init"):
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        start = 0
        if args.checkpoint.exists():
            state = torch.load(args.checkpoint, weights_only=True)
            start = state["step"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            client.load_state_dict(state["ft"])
    for step in range(start + 1, args.steps + 1):
        with section("step"):
            generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
            loss = model(torch.randn(8, 64, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not args.sections:
            client.send_heartbeat()
        if dist.get_rank() == 0:
            print(f"step {step}", flush=True)
        if step % 10:
            continue
        if args.sections:
            client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False, skip_if_not_ready=True)
        else:
            client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        with section("checkpoint"):
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if dist.get_rank() == 0:
                beside = args.checkpoint.with_suffix(".tmp")
                torch.save({**state, "ft": client.state_dict()}, beside)
                os.replace(beside, args.checkpoint)
            dist.barrier()
    client.shutdown_workload_monitoring()
    if dist.get_rank() == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        print(f"final {weights.double().sum().item().hex()}", flush=True)
    dist.destroy_process_group()


main()
