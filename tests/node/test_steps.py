"""Steps of scripts that import nothing of ours: counted right, weights and graphs as without, no trace of the hook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_harness import Rig

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[1] / "data" / "step_kinds.py"
BOUND_S = 240.0
KINDS = (
    "sgd", "adamw", "foreach", "fused", "adafactor", "lbfgs", "scaler", "accumulation", "scheduled", "gan", "trial",
    "zero", "fsdp2", "ddp", "users", "nested", "in_a_child", "closes_all", "compiled",
)  # fmt: skip


FEW = ("adamw", "nested", "closes_all")


def facts(rig: Rig, way: str, kinds: tuple[str, ...], *flags: str) -> dict[str, dict[str, Any]]:
    """What each kind has found."""
    out = rig.dir / way
    out.mkdir()
    flags = (f"--nproc-per-node={len(kinds)}", "--max-restarts=0", *flags)
    one = rig.run(str(SCRIPT), *flags, args=(str(out), *kinds))
    assert one.wait(BOUND_S) == 0, one.text[-2000:]
    return {path.stem: json.loads(path.read_text()) for path in out.iterdir()}


@pytest.mark.timeout(2 * BOUND_S)
def test_steps_are_counted_and_nothing_else_changes(rig: Rig) -> None:
    pytest.importorskip("torch")
    off = facts(rig, "off", KINDS, "--ft-step-hook=off", "--ft-preload=torch")
    assert {kind: one["words"] for kind, one in off.items()} == dict.fromkeys(KINDS)
    ways = {"forked": (KINDS, "--ft-preload=torch"), "executed": (FEW, "--ft-warm=off")}
    for way, (kinds, flag) in ways.items():
        found = facts(rig, way, kinds, flag)
        assert {kind: one["forked"] for kind, one in found.items()} == dict.fromkeys(kinds, way == "forked")
        for kind, one in found.items():
            assert (kind, one["traces"]) == (kind, [])
            step_ns, steps, first_ns, second_ns, longest_ns = one["words"]
            assert (kind, steps) == (kind, one["made"])
            assert 0 < first_ns < second_ns <= step_ns and 0 < longest_ns <= step_ns - first_ns
            same = ("kind", "made", "weights", "graphs")
            assert {name: one[name] for name in same} == {name: off[kind][name] for name in same}
