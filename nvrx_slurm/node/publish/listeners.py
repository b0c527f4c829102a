"""Who listens to the published views of a job, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.publish.publisher import Viewer, WaitLines
from nvrx_slurm.node.publish.status_file import StatusFile


def listeners(job: NodeJob, began_s: float, say: Callable[[str], None]) -> list[Viewer]:
    """All listeners of this job. `began_s`: when this coordinator began (Unix seconds). Imports only those wanted."""
    found: list[Viewer] = [WaitLines(say), StatusFile(job.run_dir.status)]
    if job.notify is not None:
        from nvrx_slurm.node.publish.announce import Announcer

        found.append(Announcer(job.notify, began_s, say))
    if job.slurm_comment and job.slurm is not None:
        from nvrx_slurm.node.publish.announce import Comment

        found.append(Comment(partial(job.control.set_comment, job.slurm.job_id), say))
    if job.metrics_file is not None:
        from nvrx_slurm.node.publish.collectors import MetricsFile

        found.append(MetricsFile(job.metrics_file, say))
    if job.otlp is not None and job.otlp.problem:
        say(job.otlp.problem)
    elif job.otlp is not None:
        from nvrx_slurm.node.publish.collectors import MetricsPush

        found.append(MetricsPush(job.otlp, say))
    return found
