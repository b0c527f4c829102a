"""Sections with a real rank monitor: what ends a rank, what does not, and a rank that writes garbage."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest
from monitor_harness import HANG, Rig, kill_monitor, readable, status, until

from nvrx_slurm.monitor.page import LIMITS, LIMITS_AT, OUTSIDE, SECTIONS


def sentence_of(code: str, **limits) -> str:
    """Run `code` to its hang; what the monitor says of it."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker("client.init_workload_monitoring()\n" + code + HANG, **limits)
            message = await rig.hang()
            assert await worker.ended() == -signal.SIGABRT
            assert message["at_s"] >= message["deadline_s"]
            return message["sentence"]

    return asyncio.run(story())


OUTER_AND_INNER = {"outer": 0.6, "inner": 30.0, "other": 0.3}
CASES = {
    "an expired outer section is noticed while a later one is fine": (
        'client.start_section("outer"); client.start_section("inner")',
        {"rank_section_timeouts": OUTER_AND_INNER},
        "in section 'outer' for 0.6",
    ),
    "whatever the order": (
        'client.start_section("inner"); client.start_section("outer")',
        {"rank_section_timeouts": OUTER_AND_INNER},
        "in section 'outer' for 0.6",
    ),
    "overlapping: the first one ends inside the second": (
        'client.start_section("inner"); client.start_section("outer"); client.end_section("inner")',
        {"rank_section_timeouts": OUTER_AND_INNER, "rank_out_of_section_timeout": 0.2},
        "in section 'outer' for 0.6",
    ),
    "out of all sections": (
        'client.start_section("outer"); client.start_section("other")\n'
        'client.end_section("outer"); client.end_section("other")',
        {"rank_section_timeouts": OUTER_AND_INNER, "rank_out_of_section_timeout": 0.4},
        "in no section for 0.4",
    ),
    "out of all sections from the start": (
        "",
        {"rank_section_timeouts": OUTER_AND_INNER, "rank_out_of_section_timeout": 0.4},
        "in no section for 0.4",
    ),
    "end_all_sections ends all of them": (
        'client.start_section("outer"); client.start_section("other"); client.end_all_sections()\n'
        'client.end_all_sections(); client.start_section("outer"); client.end_all_sections()',
        {"rank_section_timeouts": {"outer": 0.6, "other": 0.6}, "rank_out_of_section_timeout": 1.0},
        "in no section for 1.0",
    ),
    "sections do not stop heartbeats from being wanted": (
        'client.send_heartbeat(); client.start_section("inner")',
        {"rank_section_timeouts": OUTER_AND_INNER, "rank_heartbeat_timeout": 0.5},
        "no heartbeat for 0.5",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hang(case):
    code, limits, sentence = CASES[case]
    assert sentence_of(code, **limits).startswith(sentence)


def test_warm_up_ends_after_so_many_steps():
    code = """
client.shutdown_workload_monitoring()
client.init_workload_monitoring(num_warmup_iters=2)
for _ in range({steps}):
    client.start_section("step"); client.end_section("step")
client.start_section("step")
"""
    limits = {"rank_section_timeouts": {"step": 0.3, "warmup": 0.7}}
    assert sentence_of(code.format(steps=1), **limits).startswith("in section 'step' (warm-up) for 0.7")
    assert sentence_of(code.format(steps=2), **limits).startswith("in section 'step' for 0.3")


def test_megatrons_iteration_counts_where_there_is_one():
    code = """
import types
module = sys.modules["megatron.training.global_vars"] = types.ModuleType("global_vars")
module._GLOBAL_ARGS = types.SimpleNamespace(curr_iteration=500)
client.shutdown_workload_monitoring()
client.init_workload_monitoring(num_warmup_iters=2)
client.start_section("step"); client.end_section("step")
module._GLOBAL_ARGS.curr_iteration = 502
client.start_section("step")
"""
    limits = {"rank_section_timeouts": {"step": 0.3, "warmup": 30.0}}
    assert sentence_of(code, **limits).startswith("in section 'step' for 0.3")


def test_before_the_first_step_time_out_of_sections_does_not_count():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.start_section("setup"); client.end_section("setup")
                say("outside")
                sys.stdin.readline()
                client.start_section("step"); client.end_section("step")
                threading.Event().wait()
                """,
                rank_out_of_section_timeout=0.3,
                rank_section_timeouts={"setup": 0.3, "step": 0.3},
            )
            assert await worker.line() == "outside"
            with pytest.raises(asyncio.TimeoutError):
                await readable(worker.pidfd, 0.9)
            stepped_s = time.monotonic()
            worker.tell("go")
            message = await rig.hang()
            assert message["sentence"].startswith("in no section for 0.3")
            assert message["deadline_s"] >= stepped_s + 0.3
            await worker.ended()

    asyncio.run(story())


def test_what_a_rank_may_do_wrong():
    """An unknown name does nothing at all; opening twice and closing unopened are errors and change nothing."""
    code = """
client.init_workload_monitoring()
words = client._page.words
before = words.tolist()
client.start_section("unknown"); client.start_section("unknown"); client.end_section("never"); client.end_section("x")
say(words.tolist() == before)
for code in ('client.end_section("a")', 'client.start_section("a"); client.start_section("a")',
             'client.start_section(["a"])', 'client.end_section(None)', 'client.end_section([])'):
    try:
        exec(code)
        say("no error")
    except RankMonitorClientError as error:
        say(error)
client.end_section("a")
client.shutdown_workload_monitoring()
for name in ("start_section", "end_section"):
    try:
        getattr(client, name)("a")
    except RankMonitorClientError as error:
        say(error)
try:
    client.end_all_sections()
except RankMonitorClientError as error:
    say(error)
"""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(code, rank_section_timeouts={"a": 30.0})
            assert await worker.line() == "True"
            assert (await worker.line()).startswith("section 'a' is not open")
            assert (await worker.line()).startswith("section 'a' is already open")
            assert "needs the name of a section" in await worker.line()
            assert await worker.line() == "no error"  # None is just another unknown name
            assert "needs the name of a section" in await worker.line()
            for name in ("start_section", "end_section", "end_all_sections"):
                assert f"{name}() needs init_workload_monitoring() first" in await worker.line()
            assert await worker.ended() == 0

    asyncio.run(story())


def test_three_nested_sections_are_ended_soon_after_the_deadline_and_never_before():
    async def once(rig, cycle):
        worker = rig.worker(
            """
            client.init_workload_monitoring()
            for name in ("outer", "middle", "inner"):
                client.start_section(name)
            threading.Event().wait()
            """,
            cycle=cycle,
            rank_section_timeouts={"outer": 0.3, "middle": 5.0, "inner": 2.0},
        )
        message = await rig.hang()
        await readable(worker.pidfd)
        dead_s = time.monotonic()
        await worker.ended()
        rig.monitor.unwatch()
        assert message["sentence"].startswith("in section 'outer' for 0.3")
        return dead_s - message["deadline_s"]

    async def story():
        async with Rig() as rig:
            return [await once(rig, cycle) for cycle in range(5)]

    late_s = asyncio.run(story())
    assert all(0 < late < 1 for late in late_s), late_s  # scripts/bench measures the milliseconds


def test_a_new_monitor_knows_the_open_sections():
    """Three monitors in a row are killed while the section is open; its limit runs on from where it was."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.start_section("a")
                say("open")
                threading.Event().wait()
                """,
                rank_section_timeouts={"a": 3.0},
            )
            assert await worker.line() == "open"
            opened_s = time.monotonic()
            for _ in range(3):
                await kill_monitor(rig)
            message = await rig.hang()
            assert message["sentence"].startswith("in section 'a' for 3.0")
            assert message["deadline_s"] <= opened_s + 3.0
            await worker.ended()
            assert len(rig.hangs) == 1

    asyncio.run(story())


def test_sections_wait_for_nobody_also_when_the_monitor_is_stopped():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                import statistics, timeit
                client.init_workload_monitoring()
                def both():
                    client.start_section("step")
                    client.end_section("step")
                for _ in range(2):
                    say(statistics.median(timeit.repeat(both, number=2000, repeat=31)) / 2000)
                    sys.stdin.readline()
                """,
                rank_section_timeouts={"setup": 60.0, "step": 60.0, "checkpointing": 60.0, "warmup": 60.0},
                rank_out_of_section_timeout=60.0,
            )
            assert float(await worker.line()) < 1e-3  # scripts/bench measures the microseconds
            os.kill(rig.pid, signal.SIGSTOP)
            until(lambda: status(rig.pid)["State"].startswith("T"), "the monitor is stopped")
            worker.tell("again")
            assert float(await worker.line()) < 1e-3  # scripts/bench measures the microseconds
            os.kill(rig.pid, signal.SIGCONT)
            worker.tell("end")
            assert await worker.ended() == 0

    asyncio.run(story())


def test_threads_may_use_sections_of_their_own():
    """None of the four is ever out of its section for long, so the rank lives; then all stop, and it does not."""
    code = """
client.init_workload_monitoring()
until = time.monotonic() + 1.2
def work(name):
    while time.monotonic() < until:
        client.start_section(name)
        client.end_section(name)
threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
for thread in threads: thread.start()
for thread in threads: thread.join()
client.start_section("a"); client.end_section("a")
say("worked")
"""

    async def story():
        async with Rig() as rig:
            limits = {"rank_section_timeouts": dict.fromkeys("abcd", 0.5), "rank_out_of_section_timeout": 0.5}
            worker = rig.worker(code + HANG, **limits)
            assert await worker.line() == "worked"
            assert (await rig.hang())["sentence"].startswith("in no section for 0.5")
            await worker.ended()

    asyncio.run(story())


# --- hostile writers ------------------------------------------------------------------------------

VANDAL = """
client.init_workload_monitoring()
client.send_heartbeat()
words = client._page.words
say("init")
import random
random.seed({seed})
values = [0, -1, 2**63 - 1, -2**63, 5, random.getrandbits(62)]
end = time.monotonic() + 1.0
while time.monotonic() < end:
    for _ in range(1000):
        words[random.randrange(3, 512)] = random.choice(values)
for word in range({sections}, 512):
    words[word] = random.choice(values)
words[{outside}] = words[{at}] = random.choice(values)
say("done")
"""


def test_garbage_in_the_sections_harms_nobody_but_the_rank_itself():
    """No crash, no early end; the page says nothing that can be believed, so the heartbeat's own limit decides."""

    async def story():
        async with Rig() as rig:
            code = VANDAL.format(seed=random.randrange(1000), sections=SECTIONS, outside=OUTSIDE, at=LIMITS_AT)
            sections = {"a": 0.2, "step": 0.2, "warmup": 0.2}
            worker = rig.worker(
                code + HANG,
                initial_rank_heartbeat_timeout=2.5,
                rank_heartbeat_timeout=2.5,
                rank_section_timeouts=sections,
                rank_out_of_section_timeout=5.0,
            )
            assert await worker.line() == "init"
            pid = rig.pid
            assert await worker.line() == "done"
            assert rig.pid == pid
            await kill_monitor(rig)  # its successor reads the garbage in the words that are the monitor's own
            message = await rig.hang()
            assert message["sentence"].startswith(("no heartbeat for ", "no first heartbeat"))
            await worker.ended()

    asyncio.run(story())


def test_a_writer_as_fast_as_it_can_is_never_seen_out_of_its_sections():
    """Overlapping hand-overs without a gap, 0.2 s limits, 2 s: a mixture of two moments would end the rank."""
    code = """
client.init_workload_monitoring()
end = time.monotonic() + 2.0
client.start_section("a")
handovers = 0
while time.monotonic() < end:
    for _ in range(1000):
        client.start_section("b"); client.end_section("a")
        client.start_section("a"); client.end_section("b")
    handovers += 2000
client.shutdown_workload_monitoring()
say(handovers)
"""

    async def story():
        async with Rig() as rig:
            sections = {"a": 0.2, "b": 0.2}
            worker = rig.worker(code, rank_section_timeouts=sections, rank_out_of_section_timeout=0.001)
            line = await worker.line()
            assert line and int(line) > 10000, "it was ended"
            assert await worker.ended() == 0
            assert rig.hangs == []

    asyncio.run(story())


def test_a_limit_word_is_where_the_page_says():
    assert SECTIONS + 129 <= LIMITS and LIMITS + 3 + 128 <= 512
