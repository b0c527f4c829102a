"""Limits in force: a real rank monitor finds a hang in time, and none where there is none."""

import asyncio
import os
import signal
import time

import pytest
from monitor_harness import kill_monitor, status

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.monitor import transport
from nvrx_slurm.monitor.page import (
    HEARTBEAT,
    LIMITS_AT,
    MAGIC,
    OUTSIDE,
    PAGE_BYTES,
    SECTIONS,
    PageError,
    RankPage,
    create_page,
)

pytestmark = pytest.mark.process


STEP = {"rank_section_timeouts": {"step": 60.0}}
TWO = {"outer": 0.2, "inner": 30.0, "other": 0.1}
BEAT, FIRST = {"rank_heartbeat_timeout": 0.15}, {"initial_rank_heartbeat_timeout": 0.15}
OUTSIDE_TOO = {"rank_section_timeouts": TWO, "rank_out_of_section_timeout": 0.1}


def sections(*moves):
    """`+name` starts a section, `-name` ends it."""

    def do(client):
        for move in moves:
            (client.start_section if move[0] == "+" else client.end_section)(move[1:])

    return do


def beats_inside(client):
    client.send_heartbeat()
    client.start_section("inner")


HANGS = {
    "no heartbeat": (lambda client: client.send_heartbeat(), BEAT, "no heartbeat for "),
    "no first heartbeat": (lambda client: None, FIRST, "no first heartbeat for "),
    "overlapping": (sections("+inner", "+outer", "-inner"), OUTSIDE_TOO, "in section 'outer' for "),
    "all sections ended": (sections("+outer", "+other", "-outer", "-other"), OUTSIDE_TOO, "in no section for "),
    "shut down": (RankMonitorClient.shutdown_workload_monitoring, {"rank_exit_timeout": 0.15}, "no end after shutdown"),
    "heartbeats in a section": (beats_inside, {"rank_section_timeouts": TWO, **BEAT}, "no heartbeat for "),
}


async def test_each_hang_is_found_after_its_deadline(rig):
    found = {}
    for cycle, (name, (deed, limits, _)) in enumerate(HANGS.items()):
        client = rig.ready(cycle=cycle, **limits)
        deed(client)
        message = await rig.hang()
        assert 0 <= message["at_s"] - message["deadline_s"] < 1.0
        assert (message["rank"], message["local_rank"], message["cycle"]) == (3, 0, cycle)
        found[name] = message["sentence"]
        rig.unwatch()
    wrong = {name: text for name, text in found.items() if not text.startswith(HANGS[name][2])}
    assert not wrong and len(rig.hangs) == len(HANGS)


async def test_heartbeats_keep_it_alive_and_shutdown_ends_all_limits(rig):
    client = rig.ready(initial_rank_heartbeat_timeout=1.5, rank_heartbeat_timeout=0.7)
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        client.send_heartbeat()
        await asyncio.sleep(0.02)
    client.shutdown_workload_monitoring()
    await rig.no_hang(1.0)  # over the limit


async def test_the_monitor_sleeps_until_the_deadline_and_for_ever_without_one(rig):
    for cycle, limits in enumerate(({}, {"rank_heartbeat_timeout": 60.0})):
        client = rig.ready(cycle=cycle, **limits)
        client.send_heartbeat()
        await rig.settled()
        before = status(rig.pid)["voluntary_ctxt_switches"]
        for _ in range(10000):
            client.send_heartbeat()
        await rig.no_hang(0.2)
        assert status(rig.pid)["voluntary_ctxt_switches"] == before
        assert int(status(rig.pid)["VmRSS"].split()[0]) <= 12 * 1024
        rig.unwatch()


async def test_a_stopped_monitor_blocks_nothing_and_forgives_the_time_it_was_stopped(rig):
    client = rig.ready(**STEP, rank_heartbeat_timeout=0.3)
    client.send_heartbeat()
    rig.stop()
    began_s = time.perf_counter()
    for _ in range(1000):
        client.send_heartbeat()
        client.start_section("step")
        client.end_section("step")
    assert time.perf_counter() - began_s < 1.0  # scripts/bench measures the nanoseconds
    await rig.no_hang(1.5)  # over its limit, and by more than LATE_S
    resumed_s = time.monotonic()
    os.kill(rig.pid, signal.SIGCONT)
    assert (await rig.hang())["deadline_s"] >= resumed_s + 0.29


async def test_fast_hand_overs_are_never_seen_out_of_their_sections(rig):
    """Without a gap between the sections, with a limit of 1 ms outside."""
    code = """
    client.init_workload_monitoring()
    client.start_section("step")  # outside counts from the first step on
    client.start_section("a")
    client.end_section("step")
    end = time.monotonic() + 0.6
    handovers = 0
    while time.monotonic() < end:
        for _ in range(1000):
            client.start_section("b"); client.end_section("a")
            client.start_section("a"); client.end_section("b")
        handovers += 1
    client.shutdown_workload_monitoring()
    say(handovers)
    """
    limits = dict.fromkeys(("a", "b", "step"), 30.0)
    worker = rig.worker(code, rank_section_timeouts=limits, rank_out_of_section_timeout=0.001)
    assert int(await worker.line()) > 0
    assert await worker.ended() == 0 and rig.hangs == []


@pytest.mark.parametrize("last", [2**63 - 1, -1, 0, 5])
async def test_garbage_in_a_page_harms_its_rank_only(rig, last):
    """Implausible times are no progress; another monitor can still take over."""
    limits = {"initial_rank_heartbeat_timeout": 0.6, "rank_heartbeat_timeout": 0.6}
    limits |= {"rank_section_timeouts": dict.fromkeys(("a", "step", "warmup"), 0.2)}
    client = rig.ready(**limits, rank_out_of_section_timeout=0.2)
    client.send_heartbeat()
    client.start_section("a")
    pid, words = rig.pid, client._page.words
    for word in range(SECTIONS, len(words)):
        words[word] = last
    words[MAGIC] = words[HEARTBEAT] = words[OUTSIDE] = words[LIMITS_AT] = last
    await rig.settled()
    assert rig.pid == pid
    await kill_monitor(rig)  # its successor reads the garbage in the monitor's own words
    assert (await rig.sentence()).startswith(("no heartbeat", "no first heartbeat"))


def test_nobody_can_shrink_the_page_under_its_readers():
    fd = create_page()
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_other_files_and_overwritten_pages_are_refused():
    fd = os.memfd_create("other")
    with pytest.raises(PageError, match="size"):
        RankPage(fd)
    os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(PageError, match="layout"):
        RankPage(fd)
    os.close(fd)
    fd = create_page()
    page = RankPage(fd)
    page.words[0] = 1
    page.close()
    with pytest.raises(PageError, match="layout"):
        RankPage(fd)
    os.close(fd)


def state(beat, step):
    heartbeat = {"initial": 20.0, "subsequent": beat, "were_calculated": True}
    section = {"section": {"step": step}, "out_of_section": 9.0, "calculated_sections": ["step"]}
    section["is_out_of_section_calculated"] = False
    return {"current_timeouts": {"heartbeat": heartbeat, "section": section}}


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("before_init", [False, True])
async def test_loaded_limits_are_in_force_also_for_a_new_monitor(rig, before_init, killed):
    limits = {"rank_section_timeouts": {"step": 60.0, "setup": 60.0}, "rank_heartbeat_timeout": 0.3}
    client = rig.rank(**limits, workload_check_interval=0.1)
    calls = [lambda: client.load_state_dict(state(30.0, 0.6)), client.init_workload_monitoring]
    for call in calls if before_init else reversed(calls):
        call()
    client.send_heartbeat()
    assert client.hb_timeouts.subsequent == 30.0
    assert client.section_timeouts.section == {"step": 0.6, "setup": 60.0}
    assert client.section_timeouts.calculated_sections == {"step"}
    if killed:
        await kill_monitor(rig)
    started_s = time.monotonic()
    client.start_section("step")
    message = await rig.hang()  # not the configured 0.3 s without a heartbeat
    assert message["sentence"].startswith("in section 'step' for ") and "(limit 0.6 s)" in message["sentence"]
    assert message["deadline_s"] >= started_s + 0.6


async def test_limits_that_a_new_monitor_would_not_know_are_refused(rig):
    """The note for a successor has 28 KiB, a message 64. A refusal changes nothing, also for a successor."""
    long = {f"{number:03}" + "x" * 280: None for number in range(100)}
    limits = {"rank_section_timeouts": long, "workload_check_interval": 0.1}
    client = rig.ready(**limits, rank_heartbeat_timeout=60.0)
    path = os.environ["FT_RANK_MONITOR_IPC_SOCKET"]
    transport.request(path, "limits", rank_heartbeat_timeout=0.4)
    with pytest.raises(RankMonitorClientError, match="shorten"):
        transport.request(path, "limits", rank_section_timeouts=dict.fromkeys(long, 50.0))
    await kill_monitor(rig)
    client.send_heartbeat()
    assert "(limit 0.4 s)" in await rig.sentence()


async def test_limits_are_told_to_the_next_monitor_if_this_one_is_killed_in_between(rig):
    client = rig.ready(**STEP, rank_heartbeat_timeout=60.0, workload_check_interval=0.1)
    await rig.stopped_while(lambda: client.load_state_dict(state(0.4, 50.0)))
    client.send_heartbeat()
    assert "(limit 0.4 s)" in await rig.sentence()


async def test_new_limits_begin_anew_and_are_never_below_the_check_interval(rig):
    """Shorter limits end no rank for time that has already passed."""
    client = rig.ready(**STEP, rank_heartbeat_timeout=60.0, workload_check_interval=0.3)
    client.send_heartbeat()
    await rig.no_hang(0.35)
    loading_s = time.monotonic()
    client.load_state_dict(state(0.01, 40.0))
    assert (await rig.hang())["deadline_s"] >= loading_s + 0.3


async def test_init_again_begins_with_the_configured_limits_and_this_clients_own(rig):
    client = rig.ready(**STEP, rank_heartbeat_timeout=0.2)
    client.load_state_dict(state(30.0, 40.0))
    client.shutdown_workload_monitoring()
    assert client.hb_timeouts.subsequent == 30.0
    client.init_workload_monitoring()
    assert (client.hb_timeouts.subsequent, client.section_timeouts.section) == (30.0, {"step": 40.0})
    client.shutdown_workload_monitoring()
    other = RankMonitorClient()
    other.init_workload_monitoring()
    assert (other.hb_timeouts.subsequent, other.section_timeouts.section) == (0.2, {"step": 60.0})
    assert other.state_dict() == {"current_timeouts": {}}
    other.send_heartbeat()
    assert "(limit 0.2 s)" in await rig.sentence()
    other.shutdown_workload_monitoring()
