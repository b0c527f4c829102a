"""The warning that hang timeouts are set but no rank uses the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_harness import CLIENT, Rig

from nvrx_slurm.node.monitors import client_check
from nvrx_slurm.node.monitors.client_check import ClientCheck

HEARTBEAT = {"rank_heartbeat_timeout": 2.0, "initial_rank_heartbeat_timeout": None, "rank_section_timeouts": {}}
SECTION = {"rank_section_timeouts": {"step": 3.0, "only timed": None}}
NONE = {"rank_init_timeout": 5.0, "rank_heartbeat_timeout": None, "rank_section_timeouts": {"only timed": None}}
# What happens: "start" a cycle, its timer's "time" comes, a worker ends "well" or "badly"; "last": the last one.


@pytest.mark.parametrize(
    ("limits", "story", "connected", "warnings"),
    [
        (HEARTBEAT, "start well last", False, 1),
        (SECTION, "start time well last start last", False, 1),
        (HEARTBEAT, "start badly badly-last start last", False, 1),  # the cycle that failed says nothing
        (HEARTBEAT, "start badly-last", False, 0),
        (HEARTBEAT, "start time last", True, 0),
        (HEARTBEAT, "start well last", True, 0),
        (NONE, "start last", False, 0),
    ],
)
def test_one_warning_where_no_rank_has_connected(
    limits: dict[str, Any], story: str, connected: bool, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(client_check, "_EARLIEST_S", 0.0)
    fast = {k: {n: s and 1e-3 for n, s in v.items()} if isinstance(v, dict) else v and 1e-3 for k, v in limits.items()}

    async def body() -> None:
        check = ClientCheck(fast if "time" in story else limits, lambda: connected, said.append)
        for what in story.split():
            if what == "start":
                check.start()
            elif what == "time":
                while check._timer is not None:
                    await asyncio.sleep(0.001)
            else:
                check.ended(well=not what.startswith("badly"), last=what.endswith("last"))

    asyncio.run(body())
    assert len(said) == warnings


@pytest.mark.parametrize(("rank", "warnings"), [(1, 0), (9, 1)])
def test_a_rank_that_connects_is_seen(rig: Rig, rank: int, warnings: int) -> None:
    connects = f"if RANK != {rank}:\n    sys.exit()\n{CLIENT}client.shutdown_workload_monitoring()\n"
    one = rig.run(rig.script(connects), "--nproc-per-node=2", "--ft-rank-heartbeat-timeout=60")
    assert one.wait() == 0
    assert one.text.count("init_workload_monitoring") == warnings
    assert ("(rank_heartbeat_timeout 60 s" in one.text) == bool(warnings)
