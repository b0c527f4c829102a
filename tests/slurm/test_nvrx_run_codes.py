"""Every row of the table of exit codes (errors.py), as Slurm sees it: the batch script's, and each task's."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from nvrx_job import EXCLUDES_N2, SHUTS_DOWN, Jobs

from nvrx_slurm.errors import ExitCode

# A defect of ours: where it is put, every Python of the job has it.
DEFECT = """cat > $TEST_JOB/sitecustomize.py <<'END'
import nvrx_slurm.core.coordinator.cycle as r
def broken(self, event, now):
    raise LookupError("a defect")
r.Running.on_failed = broken
END
export PYTHONPATH=$TEST_JOB"""


class Row(NamedTuple):
    """A job of three nodes that ends with a code, or one agent does. `tasks`: each agent's code, "" = none runs."""

    worker: str
    flags: str = ""
    lead: str = ""
    tasks: str = ""
    says: str = ""  # in the batch script's output


ROWS: dict[ExitCode, Row] = {
    ExitCode.OK: Row("", tasks="0 0 0", says="job ends with code 0: all ranks finished"),
    ExitCode.FAILED: Row("sys.exit(7)", "--max-restarts=1", tasks="1 1 1", says="exited with code 7"),
    ExitCode.USAGE: Row("", "--spares=3", says="nvrx-run: "),
    ExitCode.NO_RESTART: Row(SHUTS_DOWN, "--max-restarts=3", tasks="93 93 93", says="down the workload: loss is NaN"),
    ExitCode.TOO_FEW_NODES: Row(EXCLUDES_N2, "--max-restarts=3", tasks="94 95 94", says="its GPU lies"),
    ExitCode.NODE_REFUSED: Row(EXCLUDES_N2, "--spares=1 --max-restarts=1", tasks="0 95 0", says="its GPU lies"),
    ExitCode.INTERNAL: Row("sys.exit(7)", lead=DEFECT, tasks="97 97 97", says="LookupError: a defect"),
}
assert set(ExitCode) - ROWS.keys() == {ExitCode.COORDINATOR_LOST}  # see below


@pytest.mark.parametrize("code", ROWS, ids=lambda code: code.name)
def test_a_job_ends_with_its_code_on_all_nodes(jobs: Jobs, code: ExitCode) -> None:
    row = ROWS[code]
    job = jobs.submit(row.worker, row.flags, nodes=3, lead=row.lead)
    end = job.wait_end()
    said = job.said()
    code = ExitCode.OK if code == ExitCode.NODE_REFUSED else code  # that is one agent's, not the job's
    assert (end.exit_code, end.signal) == (code, 0), said
    assert end.state == ("COMPLETED" if code == ExitCode.OK else "FAILED")
    assert row.says in said
    for task, wanted in enumerate(row.tasks.split()):
        told_by_srun = f"n{task + 1}: task {task}: Exited with exit code {wanted}"
        assert (told_by_srun in said) == (wanted != "0"), said
    if row.tasks and code != ExitCode.INTERNAL:
        assert job.result()["code"] == code


def test_an_agent_without_a_coordinator_ends_with_96(jobs: Jobs) -> None:
    job = jobs.new("")
    script = 'test "$SLURM_PROCID" = 0 || exec nvrx-run --rdzv-conf=join_timeout=1 worker.py'
    out = jobs.srun(job, "--nodes=2", "--ntasks-per-node=1", "--wait=0", "sh", "-c", script, code=96)
    assert "n2: task 1: Exited with exit code 96" in out
    assert job.marks("up") == []
