"""Learned limits with a real rank monitor: they are in force, and stay so whatever happens to the monitor."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from monitor_harness import HANG, Rig, kill_monitor, readable, status, until

LOADED = """
state = {{"current_timeouts": {{
    "heartbeat": {{"initial": 20.0, "subsequent": {beat}, "were_calculated": True}},
    "section": {{"section": {{"step": {step}}}, "out_of_section": 9.0, "calculated_sections": ["step"],
                "is_out_of_section_calculated": False}}}}}}
"""


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("before_init", [False, True])
def test_loaded_limits_are_in_force_also_for_a_new_monitor(before_init, killed):
    calls = ["client.load_state_dict(state)", "client.init_workload_monitoring()"]
    code = LOADED.format(beat=30.0, step=1.5) + "\n".join(calls if before_init else reversed(calls))
    code += """
client.send_heartbeat()
say(client.hb_timeouts.subsequent, client.section_timeouts.section, client.section_timeouts.calculated_sections)
sys.stdin.readline()
client.start_section("step")
"""

    async def story():
        async with Rig() as rig:
            limits = {"rank_section_timeouts": {"step": 60.0, "setup": 60.0}, "rank_heartbeat_timeout": 0.7}
            limits["workload_check_interval"] = 1.0
            worker = rig.worker(code + HANG, **limits)
            assert await worker.line() == "30.0 {'step': 1.5, 'setup': 60.0} frozenset({'step'})"
            if killed:
                await kill_monitor(rig)
            started_s = time.monotonic()
            worker.tell("go")
            message = await rig.hang()  # not the configured 0.7 s without a heartbeat
            assert message["sentence"].startswith("in section 'step' for 1.5")
            assert message["deadline_s"] >= started_s + 1.5
            await worker.ended()

    asyncio.run(story())


def test_limits_are_told_to_the_next_monitor_if_this_one_is_killed_in_between():
    """The monitor is stopped when it is asked, and killed: the rank waits for its successor and asks that."""

    async def story():
        async with Rig() as rig:
            code = (
                "client.init_workload_monitoring()\nsay('init')\nsys.stdin.readline()\n"
                + LOADED.format(beat=1.2, step=50.0)
                + "client.load_state_dict(state); client.send_heartbeat(); say('loaded')"
            )
            limits = {"rank_section_timeouts": {"step": 60.0}, "rank_heartbeat_timeout": 60.0}
            worker = rig.worker(code + HANG, workload_check_interval=1.0, **limits)
            assert await worker.line() == "init"
            os.kill(rig.pid, signal.SIGSTOP)
            until(lambda: status(rig.pid)["State"].startswith("T"), "the monitor is stopped")
            worker.tell("load")
            until(lambda: status(worker.pid)["State"].startswith("S"), "the rank waits for an answer")
            os.kill(rig.pid, signal.SIGKILL)
            assert await worker.line() == "loaded"
            assert (await rig.hang())["sentence"].startswith("no heartbeat for 1.2")
            await worker.ended()

    asyncio.run(story())


def test_new_limits_begin_anew():
    """Shorter limits for time that has passed already end nobody."""
    code = """
client.init_workload_monitoring()
client.send_heartbeat()
sys.stdin.readline()
state = {"current_timeouts": {"heartbeat": {"initial": 1, "subsequent": 1.0, "were_calculated": True}}}
client.load_state_dict(state)
say("loaded")
"""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(code + HANG, rank_heartbeat_timeout=60.0, workload_check_interval=1.0)
            with pytest.raises(asyncio.TimeoutError):
                await readable(worker.pidfd, 1.2)
            loading_s = time.monotonic()
            worker.tell("go")
            assert await worker.line() == "loaded"
            assert (await rig.hang())["deadline_s"] >= loading_s + 1.0
            await worker.ended()

    asyncio.run(story())


def test_init_again_begins_with_the_configured_limits_and_this_clients_own():
    code = (
        LOADED.format(beat=30.0, step=40.0)
        + """
client.init_workload_monitoring()
client.load_state_dict(state)
client.shutdown_workload_monitoring()
say(client.hb_timeouts.subsequent)
client.init_workload_monitoring()
say(client.hb_timeouts.subsequent, client.section_timeouts.section)
client.shutdown_workload_monitoring()
other = RankMonitorClient()
other.init_workload_monitoring()
say(other.hb_timeouts.subsequent, other.section_timeouts.section, other.state_dict())
other.send_heartbeat()
"""
    )

    async def story():
        async with Rig() as rig:
            worker = rig.worker(code + HANG, rank_section_timeouts={"step": 60.0}, rank_heartbeat_timeout=0.5)
            assert await worker.line() == "30.0"
            assert await worker.line() == "30.0 {'step': 40.0}"
            assert await worker.line() == "0.5 {'step': 60.0} {'current_timeouts': {}}"
            assert (await rig.hang())["sentence"].startswith("no heartbeat for 0.5")
            await worker.ended()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("{}", "this is not the state of a RankMonitorClient: current_timeouts is not a mapping"),
        ("{'current_timeouts': {'heartbeat': {'were_calculated': 1}}}", "initial is not a number of seconds"),
    ],
)
def test_a_bad_state_changes_nothing(state, sentence):
    code = f"""
client.init_workload_monitoring()
try:
    client.load_state_dict({state})
except RankMonitorClientError as error:
    say(error)
say(client.state_dict())
"""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(code)
            assert sentence in await worker.line()
            assert await worker.line() == "{'current_timeouts': {}}"
            assert await worker.ended() == 0

    asyncio.run(story())


def test_limits_of_strangers_and_before_init_are_refused():
    code = """
from nvrx_slurm.monitor import transport
path = os.environ["FT_RANK_MONITOR_IPC_SOCKET"]
def tell(**limits):
    try:
        transport.request(path, "limits", **limits)
        say("taken")
    except RankMonitorClientError as error:
        say(error)
tell(rank_heartbeat_timeout=5)
client.init_workload_monitoring()
tell(rank_heartbeat_timeout=-5)
tell(rank_init_timeout=5)
tell(rank_section_timeouts={"other": 5})
tell(rank_section_timeouts={"step": "x" * 50})
tell(rank_heartbeat_timeout=5)
"""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(code, rank_section_timeouts={"step": 5.0})
            assert "after init_workload_monitoring() only" in await worker.line()
            assert "rank_heartbeat_timeout must be a number" in await worker.line()
            assert "'rank_init_timeout' is not a limit that a rank can change" in await worker.line()
            assert "a section that is not in rank_section_timeouts" in await worker.line()
            assert "the timeout of section 'step' must be a number" in await worker.line()
            assert await worker.line() == "taken"
            assert await worker.ended() == 0

    asyncio.run(story())
