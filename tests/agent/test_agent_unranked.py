"""Agents that nobody gave a rank, all on one host and with one log directory."""

from __future__ import annotations

from agent_harness import Rig


def test_each_has_its_own_event_log_and_directory(rig: Rig) -> None:
    script = rig.script("say('rank', RANK)")
    place = ("--nnodes=2:2", f"--rdzv-endpoint=127.0.0.1:{rig.port}", "--rdzv-id=unranked")
    both = [rig.run(script, *place) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    agents = {path.stem.removeprefix("agent_") for path in rig.run_dir.glob("events/agent_*.jsonl")}
    nodes = {path.name.removeprefix("node_") for path in rig.run_dir.glob("cycle_0/node_*")}
    assert agents == nodes and len(nodes) == 2 and "-1" not in agents
    assert sorted(rig.log(0, rank, "out") for rank in (0, 1)) == ["rank 0\n", "rank 1\n"]
