"""A training in the shape of NVRx's examples/straggler: one section, a report every few steps; here on CPUs."""

import argparse

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import straggler
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--report-interval", type=int, default=60)
    args = parser.parse_args()
    straggler.Detector.initialize(gather_on_rank0=True, report_time_interval=0.2)
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    straggler.Detector.wrap_callables([straggler.CallableId(optimizer, "step")])
    for step in range(1, args.steps + 1):
        with straggler.Detector.detection_section("fwd", profile_cuda=True):
            loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.report_interval == 0:
            report = straggler.Detector.generate_report()
            if rank == 0:
                names = sorted(report.section_relative_perf_scores)
                best = max(report.section_relative_perf_scores["fwd"].values())
                print(f"step {step}: {names} of {len(report.rank_to_node)} ranks, best {best}", flush=True)
                print(f"GPUs {report.gpu_relative_perf_scores} stragglers {report.identify_stragglers()}", flush=True)
        elif straggler.Detector.generate_report_if_interval_elapsed() and rank:
            raise RuntimeError("only rank 0 has a report")
    straggler.Detector.shutdown()
    if rank == 0:
        print(f"final {names} {best}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
