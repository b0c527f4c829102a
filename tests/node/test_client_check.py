"""The warning that hang timeouts are set but no rank uses the client."""

import asyncio
from types import SimpleNamespace

import pytest
from agent_harness import CLIENT

from nvrx_slurm.node.monitors import client_check
from nvrx_slurm.node.monitors.client_check import ClientCheck

pytestmark = pytest.mark.process


HEARTBEAT = {"rank_heartbeat_timeout": 2.0, "initial_rank_heartbeat_timeout": None, "rank_section_timeouts": {}}
SECTION = {"rank_section_timeouts": {"step": 3.0, "only timed": None}}
NONE = {"rank_init_timeout": 5.0, "rank_heartbeat_timeout": None, "rank_section_timeouts": {"only timed": None}}


@pytest.mark.parametrize(
    "limits, ends, connected, warnings",
    [
        (HEARTBEAT, ["well", "last well"], False, 1),
        (SECTION, ["last well", "last well"], False, 1),
        (HEARTBEAT, ["bad"], False, 0),  # a cycle that failed says nothing
        (HEARTBEAT, ["well"], True, 0),
        (NONE, ["last well"], False, 0),
    ],
)
def test_one_warning_where_no_rank_has_connected(limits, ends, connected, warnings):
    said = []

    async def body():
        check = ClientCheck(limits, [SimpleNamespace(connected=connected)], said.append)
        for end in ends:
            check.start()
            check.ended(well="well" in end, last="last" in end)

    asyncio.run(body())
    assert len(said) == warnings


def test_a_cycle_that_runs_longer_than_the_timeouts_is_enough(monkeypatch):
    monkeypatch.setattr(client_check, "_EARLIEST_S", 0.0)

    async def body():
        said = asyncio.Queue()
        monitors = [SimpleNamespace(connected=False)]
        ClientCheck({"rank_heartbeat_timeout": 1e-3}, monitors, said.put_nowait).start()
        return await asyncio.wait_for(said.get(), 30.0)

    assert "rank_heartbeat_timeout 0.001 s" in asyncio.run(body())


@pytest.mark.parametrize("rank, warnings", [(1, 0), (9, 1)])
def test_a_rank_that_connects_is_seen(rig, rank, warnings):
    connects = f"if RANK != {rank}:\n    sys.exit()\n{CLIENT}client.shutdown_workload_monitoring()\n"
    one = rig.ran(rig.script(connects), "--nproc-per-node=2", "--ft-rank-heartbeat-timeout=60")
    assert one.text.count("init_workload_monitoring") == warnings
