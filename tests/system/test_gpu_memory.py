"""Waiting for GPU memory between cycles (seed 000): bounded, best effort, of the GPUs that are ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import standin

from nvrx_slurm.system import gpus
from nvrx_slurm.system.hardware import Absent, HardwareError

FULL, FREE = {"GPU 0": 70000.0, "GPU 1": 3.0}, {"GPU 0": 5.0, "GPU 1": 3.0}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What NVML says at each look; the last one stays."""

    def script(*values: dict[str, float] | Exception) -> None:
        left = list(values)

        def look(env, timeout_s):
            value = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(gpus, "memory_used_mb", look)

    return script


def test_it_waits_until_the_last_gpu_is_free(looks) -> None:
    looks(FULL, {"GPU 0": 600.0, "GPU 1": 900.0}, {"GPU 0": 513.0, "GPU 1": 3.0}, FREE)
    done = gpus.wait_until_free({}, poll_s=0.001)
    assert done.free
    assert done.used_mb == {"GPU 0": (70000.0, 5.0), "GPU 1": (3.0, 3.0)}
    assert done.text.startswith("GPU memory was free after ")
    assert done.text.endswith("s: GPU 0 70000 -> 5 MiB, GPU 1 3 -> 3 MiB")


def test_what_is_within_the_tolerance_is_free(looks) -> None:
    looks({"GPU 0": 512.0})
    assert gpus.wait_until_free({}).free
    looks({"GPU 0": 512.5})
    assert not gpus.wait_until_free({}, timeout_s=0.01, poll_s=0.001).free
    assert gpus.wait_until_free({}, timeout_s=0.01, poll_s=0.001, tolerance_mb=600.0).free


def test_after_the_timeout_it_says_who_holds_how_much(looks) -> None:
    looks(FULL, {"GPU 0": 60000.0, "GPU 1": 3.0})
    done = gpus.wait_until_free({}, timeout_s=0.02, poll_s=0.001)
    assert not done.free and done.seconds >= 0.02
    assert re.match(r"1 of 2 GPUs hold more than 512 MiB after [\d.]+ s: GPU 0 70000 -> 60000 MiB, ", done.text)


def test_a_long_poll_does_not_make_it_longer(looks) -> None:
    looks(FULL)
    assert not gpus.wait_until_free({}, timeout_s=0.02, poll_s=1000.0).free


def test_it_can_be_stopped(looks) -> None:
    looks(FULL)
    stop = threading.Event()
    done: list[gpus.Reclaim] = []
    waiting = threading.Thread(target=lambda: done.append(gpus.wait_until_free({}, 1000.0, poll_s=1000.0, stop=stop)))
    waiting.start()
    stop.set()
    waiting.join(30)
    assert done and not done[0].free


def test_without_gpus_or_with_sick_ones_it_goes_on(looks) -> None:
    looks(Absent("no NVML here (Driver Not Loaded)"))
    assert gpus.wait_until_free({})[:2] == (True, "no GPU memory to wait for: no NVML here (Driver Not Loaded)")
    looks(FULL, HardwareError("GPU 0: GPU is lost"))
    assert gpus.wait_until_free({}, poll_s=0.001)[:2] == (False, "GPU memory cannot be read: GPU 0: GPU is lost")
    looks(FULL)
    assert gpus.wait_until_free({}, timeout_s=0)[:2] == (True, "GPU memory was not waited for (its timeout is 0)")


# --- on nvidia-ml-py and the stand-in -------------------------------------------------------------------------------

CHILD = """
import json, os, sys
from nvrx_slurm.system import gpus
timeout_s = float(sys.argv[1])
done = gpus.wait_until_free(os.environ, timeout_s=timeout_s, poll_s=0.01)
print(json.dumps([done.free, done.text, done.used_mb]), flush=True)
os._exit(0)  # with a thread that hangs
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[standin.StandIn]:
    directory = tmp_path_factory.mktemp("nvml")
    try:
        yield standin.StandIn(standin.built(directory), directory / "state")
    except LookupError as error:
        pytest.skip(str(error))


def waited(stand_in: standin.StandIn, timeout_s: float, *facts: str, **env: str) -> tuple[bool, str, dict]:
    stand_in.say("count 4", *facts)
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    argv = [sys.executable, "-c", CHILD, str(timeout_s)]
    done = subprocess.run(
        argv, env=inherited | stand_in.env | env, capture_output=True, text=True, timeout=60, check=True
    )
    return tuple(json.loads(done.stdout))


def test_only_our_gpus_are_waited_for(stand_in: standin.StandIn) -> None:
    """By CUDA_VISIBLE_DEVICES, which counts among the GPUs that the cgroup leaves."""
    used = "used.2 70000"
    assert waited(stand_in, 0.05, used)[0] is False
    free, _, numbers = waited(stand_in, 5, used, CUDA_VISIBLE_DEVICES="0,3")
    assert free and set(numbers) == {"GPU 0 (GPU-0000)", "GPU 3 (GPU-3000)"}
    assert waited(stand_in, 0.05, used, CUDA_VISIBLE_DEVICES="2")[0] is False
    free, _, numbers = waited(stand_in, 0.05, used, "missing.0 1", CUDA_VISIBLE_DEVICES="1")
    assert not free and set(numbers) == {"GPU 2 (GPU-2000)"}
    free, text, _ = waited(stand_in, 5, used, CUDA_VISIBLE_DEVICES="MIG-7")
    assert (free, text) == (True, "no GPU memory to wait for: a MIG instance, not a whole GPU, is assigned")


def test_the_drivers_own_memory_does_not_count(stand_in: standin.StandIn) -> None:
    assert waited(stand_in, 5, "reserved 600", "used 2")[0] is True
    assert waited(stand_in, 5, "nvmlDeviceGetMemoryInfo_v2 13", "reserved 0", "used 2")[0] is True


def test_a_driver_that_hangs_ends_with_the_timeout(stand_in: standin.StandIn) -> None:
    free, text, _ = waited(stand_in, 0.3, "nvmlDeviceGetMemoryInfo_v2.3 hang")
    assert not free and text.startswith("GPU memory cannot be read: NVML did not answer within 0.")
    assert "nvmlDeviceGetMemoryInfo_v2" in stand_in.met()
    Path(f"{stand_in.state}.met").unlink()
