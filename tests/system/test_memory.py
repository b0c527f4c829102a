"""How much memory the job may use, read from trees of files as the kernel shows them."""

import pytest

from nvrx_slurm.system.memory import free_bytes

pytestmark = pytest.mark.fast
GB = 1 << 30
GROUP = "job_7/step_0"
V1, V2 = {"proc/self/cgroup": f"4:memory:/{GROUP}\n1:cpu:/\n"}, {"proc/self/cgroup": f"0::/{GROUP}\n"}


def tree(root, files):
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GB // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(path, **values):
    """The files of a cgroup, by their names after "memory."."""
    return {f"sys/fs/cgroup/{path}/memory.{name}": f"{value}\n" for name, value in values.items()}


@pytest.mark.parametrize(
    "files, free, of",
    [
        ({}, 8 * GB, "machine"),
        (V2 | group(GROUP, max="max"), 8 * GB, "machine"),
        (
            V2 | group(GROUP, max=4 * GB, current=3 * GB, stat=f"active_file 5\ninactive_file {GB}"),
            2 * GB,
            "step_0",
        ),
        (V2 | group("job_7", max=4 * GB, current=5 * GB), 0, "job_7"),  # the limit is that of the job, above the step
        (
            V1 | group(f"memory/{GROUP}", limit_in_bytes=4 * GB, usage_in_bytes=3 * GB),
            GB,
            "memory/job_7/step_0",
        ),
        ({"proc/meminfo": "", **V2}, 0, "machine"),
        ({"proc/self/cgroup": "0::/../..\n"}, 8 * GB, "machine"),
    ],
)
def test_the_nearest_limit_counts(tmp_path, files, free, of):
    found, told = free_bytes(tree(tmp_path, files))
    assert found == free and of in told


def test_of_this_machine():
    assert free_bytes()[0] > 0
