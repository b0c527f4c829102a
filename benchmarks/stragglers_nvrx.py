"""NVRx's rule, by its own code, on windows of other jobs: one process per rank, started by torchrun in NVRx's venv.

stragglers_nvrx.py FILE   FILE: by job, window and rank, the median work and wait (ms). The last line that rank 0 prints
is, by job and window, which ranks are flagged by which score.
"""

import json
import sys

import torch.distributed as dist
from nvidia_resiliency_ext.straggler import Statistic
from nvidia_resiliency_ext.straggler.reporting import ReportGenerator

SCORES = ["relative_perf_scores", "individual_perf_scores"]


def main(path):
    """Report each window, as Detector.generate_report() would."""
    dist.init_process_group("gloo")
    rank, jobs = dist.get_rank(), []
    with open(path) as file:
        told = json.load(file)
    for windows in told:
        generator, flagged = ReportGenerator(SCORES, node_name="node"), []
        for window in windows:
            sections = {
                name: {Statistic.MED: took} for name, took in zip(("work", "backward"), window[rank], strict=True)
            }
            report = generator.generate_report(sections, {})
            if rank == 0:
                found = report.identify_stragglers()
                flagged.append(
                    {
                        f"{section}, {kind}": sorted(
                            one.rank for one in found[f"straggler_sections_{kind}"].get(section, ())
                        )
                        for section in ("work", "backward")
                        for kind in ("relative", "individual")
                    }
                )
        jobs.append(flagged)
    if rank == 0:
        print(json.dumps(jobs))
    dist.destroy_process_group()


main(sys.argv[1])
