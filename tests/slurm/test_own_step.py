"""The step that a process is in, and the variables of another one, which a job that was submitted there inherits."""

import pytest

from nvrx_slurm.slurm import own_step
from nvrx_slurm.slurm.own_step import OwnStep

pytestmark = pytest.mark.fast

OF_JOB = {"SLURM_JOB_ID": "14", "SLURM_STEPMGR": "n1"}  # the latter since Slurm 24.05
STALE = OF_JOB | {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n1"}


def proc(tmp_path, cgroup, titles):
    """A /proc with this process below these, the nearest first."""
    for pid, title in zip(["self", "2", "3"], ["nvrx-run", *titles], strict=False):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_text(title, errors="surrogateescape")
        (tmp_path / pid / "stat").write_text(f"7 (a) b) S {2 if pid == 'self' else 3} 1 1")
    (tmp_path / "self/cgroup").write_text(cgroup)
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup", "titles", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_14/step_batch/user/task_0\n", [], OwnStep("14", "batch")),
        ("4:memory:/slurm/uid_0/job_14/step_0/task_0\n0::/\n", [], OwnStep("14", "0")),
        ("0::/\n", ["bash\0job.sh", "slurmstepd: [14.batch]\0"], OwnStep("14", "batch")),
        ("0::/\n", ["slurmstepd: [14.3]"], OwnStep("14", "3")),
        ("0::/\n", ["bash\0r\udce9sum\udce9.sh", "slurmstepd: [14.batch]"], OwnStep("14", "batch")),  # Latin-1
        ("0::/\n", ["slurmstepd: [14+1.0]", "init"], None),
        ("0::/\n", ["bash"], None),
        ("0::/slurmstepd.scope/job_9/step_0/user/task_0\n", ["slurmstepd: [14.0]"], OwnStep("14", "0")),  # in job 9
    ],
)
def test_by_cgroup_or_slurmstepd(tmp_path, cgroup, titles, expected):
    assert own_step.find(proc(tmp_path, cgroup, titles)) == expected


@pytest.mark.parametrize(
    ("step", "more", "stays"),
    [
        (OwnStep("14", "batch"), {}, False),  # sbatch in a step
        (OwnStep("13", "0"), {}, False),  # salloc in a step
        (OwnStep("14", "0"), {}, True),
        (OwnStep("15", "0"), {"SLURM_HET_SIZE": "2"}, True),
        (OwnStep("14", "extern"), {}, True),
        (None, {}, True),
    ],
)
def test_variables_of_another_step_are_removed(step, more, stays):
    env = STALE | more
    own_step.forget_another(env, step)
    assert env == (STALE | more if stays else OF_JOB | more)
