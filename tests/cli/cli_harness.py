"""What the tests of the command line share: recorded Slurm environments, and how a run ended."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
CLEAN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(REPO), "SLURM_CONF": "/nonexistent"}
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_CLUSTER_NAME": "c",
}  # fmt: skip
BATCH_SCRIPT = {**BATCH, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
TASK = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_PROCID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NUM_NODES": "3", "SLURMD_NODENAME": "n2",
}  # fmt: skip
SEVERAL = {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "true"}
ONE_TASK = {
    **TASK, "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURMD_NODENAME": "n1",
}  # fmt: skip


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def refused(self, *parts):
        """One sentence on stderr with these parts, exit code 2, no output."""
        assert (self.code, self.out) == (2, ""), self
        assert self.err.startswith("nvrx-run") and self.err.count("\n") == 1 and len(self.err) < 700
        assert all(part in self.err for part in parts), self.err
