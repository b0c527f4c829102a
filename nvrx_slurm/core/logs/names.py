"""Names of the merged files: placeholders and cycles. Pure."""

from __future__ import annotations

import posixpath
import re

from nvrx_slurm.declared import Record

_PLACEHOLDER = re.compile(r"%(.?)", re.DOTALL)
_KNOWN = "jAar%"


class JobName(Record):
    """What the placeholders stand for. Outside Slurm `job` is the name of the run."""

    job: str  # %j: the job id, unique also for the tasks of an array
    array_job: str = ""  # %A: the id of the array; "" = there is none, and %A is the job id
    task: str = ""  # %a: the task of the array; "" = 0
    restart: int = 0  # %r: how often Slurm requeued the job


def check(template: str) -> None:
    """Raises ValueError ("must ...") for a placeholder that does not exist."""
    for found in _PLACEHOLDER.finditer(template):
        if not found[1] or found[1] not in _KNOWN:
            raise ValueError(
                "must have no placeholders but %j (job), %A (array), %a (task), %r (requeues) and %%"
            )


def expand(template: str, name: JobName) -> str:
    """The path with its placeholders replaced. An id with a slash cannot leave the directory."""
    values = {
        "j": name.job,
        "A": name.array_job or name.job,
        "a": name.task or "0",
        "r": str(name.restart),
        "%": "%",
    }
    return _PLACEHOLDER.sub(lambda found: values[found[1]].replace("/", "_"), template)


def tells_jobs_apart(template: str) -> bool:
    """Whether two jobs with this template never write to one file."""
    found = {match[1] for match in _PLACEHOLDER.finditer(template)}
    return "j" in found or {"A", "a"} <= found


def cycle_file(prefix: str, cycle: int) -> str:
    """/x/train.log -> /x/train_cycle0.log. Without a suffix it is .log."""
    stem, suffix = posixpath.splitext(prefix)
    return f"{stem}_cycle{cycle}{suffix or '.log'}"


def index_file(merged: str) -> str:
    """The index beside a merged file."""
    return merged + ".idx"
