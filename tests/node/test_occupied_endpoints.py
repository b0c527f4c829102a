"""Where programs without the job's token hold all endpoints for 2 s, the job's coordinator can be at none."""

from __future__ import annotations

from nvrx_slurm.node.coordination.occupied_endpoints import OccupiedEndpoints


def test_only_all_candidates_for_two_seconds_without_a_break_count() -> None:
    said: list[str] = []
    foreign = OccupiedEndpoints(2, said.append)
    assert not foreign.hold_all("a", True, 0.0) and not foreign.hold_all("a", True, 9.0)  # the other one may be ours
    assert not foreign.hold_all("b", True, 9.0) and not foreign.hold_all("a", True, 10.9)
    assert foreign.hold_all("a", True, 11.0)
    assert not foreign.hold_all("b", False, 12.0)  # its port is free: the coordinator may still come
    assert not foreign.hold_all("a", True, 13.0) and not foreign.hold_all("b", True, 15.5)
    for sentence in ("x", "y", "x"):
        foreign.say(sentence)
    assert said == ["x", "y"]
