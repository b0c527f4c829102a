"""NIC ports that wait for the subnet manager: how long they are looked at again, and which are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from recorded import Node
from test_nic import CHECKS, F, P, found, port

from nvrx_slurm.health import registry
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.checks import nic
from nvrx_slurm.health.runner import examine


@pytest.fixture
def node(dgx: Node) -> Node:
    """How its ports were can be kept."""
    (dgx / f"/run/user/{os.geteuid()}").mkdir(parents=True, exist_ok=True)
    return dgx


def _looks(monkeypatch: pytest.MonkeyPatch, at_second: Callable[[], None]) -> list[float]:
    """The times of waiting for another look; before it `at_second` is called."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        at_second()

    monkeypatch.setattr(nic.time, "sleep", sleep)
    return waits


@pytest.mark.parametrize("name", ["nic-ports", "gpu-nics"])
@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED"])
def test_a_subnet_manager_that_has_just_been_restarted_is_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    names = [f"mlx5_{n}" for n in range(7)]  # the eighth was never active, and is not waited for
    port(node, "mlx5_7", "state", "2: INIT")
    assert found(node, name)[0] is P

    def come_up() -> None:
        for each in names:
            port(node, each, "state", "4: ACTIVE")

    waits = _looks(monkeypatch, come_up)
    for each in names:
        port(node, each, "state", state)
    assert found(node, name)[0] is P and len(waits) == 1
    assert found(node, name)[0] is P and len(waits) == 1, "waited for what nobody wants"


@pytest.mark.parametrize(
    ("file", "text"),
    [("state", "1: DOWN"), ("phys_state", "2: Polling"), ("phys_state", "")],
)
def test_a_port_whose_link_is_down_fails_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    assert found(node, "nic-ports")[0] is P
    waits = _looks(monkeypatch, lambda: None)
    port(node, "mlx5_2", "state", "2: INIT")  # which would be waited for
    port(node, "mlx5_3", "state", "2: INIT")
    port(node, "mlx5_3", file, text)
    assert found(node, "nic-ports")[0] is F and not waits


def test_no_more_than_there_is_time_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic, "_SETTLE_S", 1e6)
    assert found(node, "nic-ports")[0] is P
    port(node, "mlx5_3", "state", "2: INIT")
    view = NodeView(str(node.root), {})
    view.deadline_s = time.monotonic() + 1.0
    said = examine(CHECKS["nic-ports"], view, registry.defaults(CHECKS.values()))
    assert said == (F, "mlx5_3/1 is INIT, LinkUp")


def test_the_wait_is_within_the_checks_own_time() -> None:
    assert all(CHECKS[name].budget_s > nic._SETTLE_S for name in ("nic-ports", "gpu-nics"))
