"""What slows a node down, by files of the kernel and by what NVML says of the GPUs."""

import pytest

from nvrx_slurm.node.monitors import signs
from nvrx_slurm.node.monitors.signs import Counters
from nvrx_slurm.system import gpu_facts

pytestmark = pytest.mark.fast
PSI = "some avg10=1.00 avg60={} avg300=0.00 total=1\nfull avg10=0.00 avg60=99.00 avg300=0.00 total=1\n"
FILES = {
    "proc/stat": "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 1 1 1 1 1 1 1 1 1\n",
    "proc/self/cgroup": "4:memory:/a\n0::/system.slice/job_7\n",
    "sys/fs/cgroup/system.slice/job_7/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 3\nthrottled_usec 4\n",
}


def node(place, files):
    for name, text in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


def test_pressure_of_the_last_minute(tmp_path):
    """Of some tasks; from 10 % on."""
    node(tmp_path, {"proc/pressure/cpu": PSI.format("35.20"), "proc/pressure/io": PSI.format("9.90")})
    assert list(signs.pressure(tmp_path)) == ["tasks waited for cpu 35 % of the last minute"]
    node(tmp_path, {"proc/pressure/memory": PSI.format("10.00"), "proc/pressure/cpu": "off"})
    assert [text.split()[3] for text in signs.pressure(tmp_path)] == ["memory"]


@pytest.mark.parametrize(
    "damage, found",
    [
        ({}, Counters(80, 360, 3)),
        ({"proc/stat": "cpu 1 2"}, Counters(0, 0, 3)),
        ({"proc/stat": "none"}, Counters(0, 0, 3)),
        ({"proc/self/cgroup": "4:memory:/a\n"}, Counters(80, 360, 0)),
        ({"proc/self/cgroup": "0::/elsewhere\n"}, Counters(80, 360, 0)),
        ({"sys/fs/cgroup/system.slice/job_7/cpu.stat": "usage_usec 5\n"}, Counters(80, 360, 0)),
    ],
)
def test_counters_of_the_kernel(tmp_path, damage, found):
    assert signs.counters(node(tmp_path, FILES | damage)) == found


def test_what_has_grown_between_two_readings():
    """The hypervisor's part counts above 2 %, each stop by the cgroup's limit counts."""
    before = Counters(10, 1000, 3)
    assert not list(signs.grown(before, before)) and not list(signs.grown(before, Counters(12, 1100, 3)))
    (stolen,) = signs.grown(before, Counters(35, 1100, 3))
    (throttled,) = signs.grown(before, Counters(10, 1100, 8))
    assert "hypervisor took 25 %" in stolen and "stopped it 5 times" in throttled


def test_all_signs_are_one_sentence(tmp_path, monkeypatch):
    """A GPU that is not held down, and what cannot be read, is not named."""
    reasons = {"GPU 3 (GPU-3000)": ("hw-thermal",), "GPU 4 (GPU-4000)": ()}
    monkeypatch.setattr(gpu_facts, "throttle_reasons", lambda env: reasons)
    monkeypatch.setattr(signs, "BETWEEN_S", 0.0)
    assert signs.read(tmp_path) == "GPU 3 (GPU-3000) is held down (hw-thermal)"
    node(tmp_path, FILES | {"proc/pressure/io": PSI.format("50.00")})
    assert signs.read(tmp_path).endswith("(hw-thermal); tasks waited for io 50 % of the last minute")
