"""How much memory the job may use, read from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.system.memory import free_bytes

pytestmark = pytest.mark.fast

GB = 1 << 30
GROUP = "job_7/step_0"
V1, V2 = {"proc/self/cgroup": f"4:memory:/{GROUP}\n1:cpu:/\n"}, {"proc/self/cgroup": f"0::/{GROUP}\n"}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GB // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "free", "of"),
    [
        ({}, 8 * GB, "machine"),
        ({**V2, f"sys/fs/cgroup/{GROUP}/memory.max": "max\n"}, 8 * GB, "machine"),
        (
            {
                **V2,
                f"sys/fs/cgroup/{GROUP}/memory.max": f"{4 * GB}\n",
                f"sys/fs/cgroup/{GROUP}/memory.current": f"{3 * GB}\n",
                f"sys/fs/cgroup/{GROUP}/memory.stat": f"active_file 5\ninactive_file {GB}\n",
            },
            2 * GB,
            "step_0",
        ),
        (  # the limit is that of the job, above the step
            {
                **V2,
                "sys/fs/cgroup/job_7/memory.max": f"{4 * GB}\n",
                "sys/fs/cgroup/job_7/memory.current": f"{5 * GB}\n",
            },
            0,
            "job_7",
        ),
        (
            {
                **V1,
                f"sys/fs/cgroup/memory/{GROUP}/memory.limit_in_bytes": f"{4 * GB}\n",
                f"sys/fs/cgroup/memory/{GROUP}/memory.usage_in_bytes": f"{3 * GB}\n",
            },
            GB,
            "memory/job_7/step_0",
        ),
        ({"proc/meminfo": "", **V2}, 0, "machine"),
        ({"proc/self/cgroup": "0::/../..\n"}, 8 * GB, "machine"),
    ],
)
def test_the_nearest_limit_counts(tmp_path: Path, files: dict[str, str], free: int, of: str) -> None:
    found, told = free_bytes(tree(tmp_path, files))
    assert found == free and of in told


def test_of_this_machine() -> None:
    assert free_bytes()[0] > 0
