"""What looks like a number to Python's str.isdigit and is none to int(): '²', and more digits than it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.hooks import leftovers
from nvrx_slurm.inprocess import wrapper
from nvrx_slurm.inprocess.environment import Environment
from nvrx_slurm.inprocess.meeting import tcp
from nvrx_slurm.inprocess.plugins import abort
from nvrx_slurm.inprocess.watch.board import Board
from nvrx_slurm.system import gpus
from nvrx_slurm.system.hardware import HardwareError

NO_NUMBERS = ["²", "1²", "①", "9" * 5000]


class Nvml:
    """As much of pynvml as a wrong name needs."""

    NVMLError = OSError


@pytest.mark.parametrize("word", NO_NUMBERS)
def test_a_gpu_that_is_no_number_is_one_that_nvml_does_not_see(word: str) -> None:
    with pytest.raises(HardwareError, match="which NVML does not see"):
        gpus._number(Nvml, word, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["²", "1²", "①", "9" * 200])
def test_only_numbers_are_processes(tmp_path: Path, word: str) -> None:
    for name in ("dev/nvidia0", f"proc/{word}/cgroup"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.touch()
    assert leftovers.end(NodeView(str(tmp_path)), leftovers.Job(("7",), 1000)) == leftovers.Facts([], [], [])


@pytest.mark.parametrize("word", NO_NUMBERS)
def test_an_environment_without_numbers_is_as_if_it_were_not_set(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_PORT", "NVRX_CYCLE"):
        monkeypatch.setenv(name, word)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NVRX_BOARD", "/nowhere/board")
    monkeypatch.setattr(abort, "_kept", set())
    assert wrapper._with_hardware(None) is None
    assert Board.from_env() is not None
    assert abort._cut_store() == 0
    assert Environment()._address(1)
    with pytest.raises(UsageError, match="is not a port"):
        tcp.master_port()
