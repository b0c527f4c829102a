"""A real rank monitor with real workers: what it lets live, what it ends, and how fast."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from monitor_harness import Rig, readable, status, until

from nvrx_slurm.agent import monitors


def run(coroutine):
    return asyncio.run(coroutine)


BEATS = """
client.init_workload_monitoring()
say("init")
end = time.monotonic() + 1.0
while time.monotonic() < end:
    client.send_heartbeat()
    threading.Event().wait(0.02)
say("shutdown")
client.shutdown_workload_monitoring()
assert not client.is_initialized
sys.stdin.readline()
"""


def test_heartbeats_keep_it_alive_and_shutdown_ends_all_limits():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(BEATS, initial_rank_heartbeat_timeout=0.5, rank_heartbeat_timeout=0.25)
            assert await worker.line() == "init"
            assert await worker.line() == "shutdown"
            with pytest.raises(asyncio.TimeoutError):  # four times the limit without a heartbeat, after shutdown
                await readable(worker.pidfd, 1.0)
            worker.tell("end")
            assert await worker.ended() == 0
            assert rig.hangs == []

    run(story())


HANGS = """
client.init_workload_monitoring()
client.send_heartbeat()
say("init")
def a_function_with_a_name_to_find():
    threading.Event().wait()
a_function_with_a_name_to_find()
"""


def test_a_hang_is_ended_and_its_stacks_are_in_its_log():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(HANGS, rank_heartbeat_timeout=0.3)
            message = await rig.hang()
            assert await worker.ended() == -signal.SIGABRT
            assert message["sentence"].startswith("no heartbeat for 0.3") and "(limit 0.3 s)" in message["sentence"]
            assert (message["rank"], message["local_rank"], message["cycle"]) == (3, 0, 0)
            assert "a_function_with_a_name_to_find" in worker.err.read_text()
            assert not list(worker.err.parent.glob("core*"))

    run(story())


def test_a_stopped_worker_is_ended_soon_after_its_deadline_and_never_before():
    async def once(rig, cycle):
        worker = rig.worker(HANGS, cycle=cycle, rank_heartbeat_timeout=0.3)
        await worker.line()
        os.kill(worker.pid, signal.SIGSTOP)
        await readable(worker.pidfd)
        dead_s = time.monotonic()
        message = await rig.hang()
        assert await worker.ended() == -signal.SIGABRT
        assert "most recent call first" in worker.err.read_text()
        rig.monitor.unwatch()
        return dead_s - message["deadline_s"]

    async def story():
        async with Rig() as rig:
            return [await once(rig, cycle) for cycle in range(5)]

    late_s = run(story())
    assert all(0 < late < 1 for late in late_s), late_s  # scripts/bench measures the milliseconds


def test_a_hang_before_init_is_ended_when_there_is_a_limit_for_it():
    async def story():
        async with Rig() as rig:
            worker = rig.worker("threading.Event().wait()", rank_init_timeout=0.5)
            message = await rig.hang()
            assert await worker.ended() == -signal.SIGABRT
            assert message["sentence"].startswith("no init_workload_monitoring() for 0.5")

    run(story())


def test_no_first_heartbeat():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                "client.init_workload_monitoring(); threading.Event().wait()", initial_rank_heartbeat_timeout=0.2
            )
            message = await rig.hang()
            assert await worker.ended() == -signal.SIGABRT
            assert message["sentence"].startswith("no first heartbeat for 0.2")

    run(story())


@pytest.mark.parametrize("code", ["", "client.init_workload_monitoring()"])
def test_without_limits_nothing_is_ended_and_the_monitor_never_wakes(code):
    async def story():
        async with Rig() as rig:
            worker = rig.worker(code + "\nsay('up'); sys.stdin.readline(); say('done'); sys.stdin.readline()")
            assert await worker.line() == "up"
            await rig.settled()
            before = status(rig.pid)["voluntary_ctxt_switches"]
            with pytest.raises(asyncio.TimeoutError):
                await readable(worker.pidfd, 0.5)
            worker.tell("go on")
            assert await worker.line() == "done"
            assert status(rig.pid)["voluntary_ctxt_switches"] == before
            assert rig.hangs == []

    run(story())


def test_heartbeats_do_not_wake_the_monitor_before_the_deadline():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.send_heartbeat()
                say("init")
                sys.stdin.readline()
                for _ in range(100000):
                    client.send_heartbeat()
                say("done")
                sys.stdin.readline()
                """,
                rank_heartbeat_timeout=60.0,
            )
            await worker.line()
            await rig.settled()
            before = status(rig.pid)["voluntary_ctxt_switches"]
            worker.tell("go")
            assert await worker.line() == "done"
            assert status(rig.pid)["voluntary_ctxt_switches"] == before

    run(story())


def test_the_users_own_termination_signal_comes_alone():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                signal.signal(signal.SIGUSR1, lambda *_: (say("got it"), os._exit(7)))
                client.init_workload_monitoring()
                say("init")
                signal.pause()
                """,
                signum=signal.SIGUSR1,
                initial_rank_heartbeat_timeout=0.3,
            )
            assert await worker.line() == "init"
            await rig.hang()
            assert await worker.line() == "got it"
            assert await worker.ended() == 7
            assert "Fatal Python error" not in worker.err.read_text()

    run(story())


@pytest.mark.parametrize(("handled", "signum"), [("SIGTERM", signal.SIGTERM), ("SIGABRT", signal.SIGKILL)])
def test_a_worker_that_survives_the_first_step_is_killed_with_its_group(monkeypatch, handled, signum):
    program = monitors._PROGRAM.replace(
        "from nvrx", "import nvrx_slurm.core.rank.watch as w; w.SIGNAL_GRACE_S = w.STACKS_GRACE_S = 0.3; from nvrx"
    )
    monkeypatch.setattr(monitors, "_PROGRAM", program)

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                f"""
                signal.signal(signal.{handled}, lambda *_: say("not me"))
                client.init_workload_monitoring()
                say("init")
                while True:
                    signal.pause()
                """,
                signum=signum,
                initial_rank_heartbeat_timeout=0.3,
            )
            assert await worker.line() == "init"
            message = await rig.hang()
            assert await worker.line() == "not me"
            assert await worker.ended() == -signal.SIGKILL
            assert time.monotonic() - message["at_s"] >= 0.3

    run(story())


def test_a_worker_without_an_abort_handler_is_killed_at_once():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                import faulthandler
                faulthandler.disable()
                client.init_workload_monitoring()
                threading.Event().wait()
                """,
                initial_rank_heartbeat_timeout=0.3,
            )
            await rig.hang()
            assert await worker.ended() == -signal.SIGKILL

    run(story())


def test_the_stacks_of_a_rank_behind_a_wrapper_are_printed_too():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                import subprocess  # this is the wrapper: it has no handler for SIGABRT
                import faulthandler; faulthandler.disable()
                code = (
                    "import sys, threading; sys.path.insert(0, %r)\\n" % sys.path[0] +
                    "from nvrx_slurm.fault_tolerance import RankMonitorClient\\n"
                    "RankMonitorClient().init_workload_monitoring()\\n"
                    "def behind_the_wrapper(): threading.Event().wait()\\n"
                    "behind_the_wrapper()"
                )
                subprocess.run([sys.executable, "-c", code])
                """,
                initial_rank_heartbeat_timeout=0.5,
            )
            await rig.hang()
            await worker.ended()
            assert "behind_the_wrapper" in worker.err.read_text()

    run(story())


def test_a_hung_worker_takes_its_children_along():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                import subprocess
                child = subprocess.Popen(["sleep", "1000"])
                client.init_workload_monitoring()
                say(child.pid)
                threading.Event().wait()
                """,
                initial_rank_heartbeat_timeout=0.3,
            )
            child = os.pidfd_open(int(await worker.line()))
            await rig.hang()
            await readable(child)
            os.close(child)

    run(story())


@pytest.mark.parametrize("signame", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_for_the_step_do_not_end_the_monitor(signame):
    async def story():
        async with Rig() as rig:
            worker = rig.worker(HANGS, rank_heartbeat_timeout=0.4)
            await worker.line()
            pid = rig.pid
            os.kill(pid, getattr(signal, signame))
            await rig.hang()
            await worker.ended()
            assert rig.pid == pid

    run(story())


def test_a_stopped_monitor_blocks_no_heartbeat_and_forgives_the_time_it_was_stopped():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.send_heartbeat()
                say("init")
                sys.stdin.readline()
                start = time.perf_counter()
                for _ in range(10000):
                    client.send_heartbeat()
                say((time.perf_counter() - start) / 10000)
                sys.stdin.readline()
                """,
                rank_heartbeat_timeout=0.5,
            )
            await worker.line()
            os.kill(rig.pid, signal.SIGSTOP)
            until(lambda: status(rig.pid)["State"].startswith("T"), "the monitor is stopped")
            worker.tell("beat")
            assert float(await worker.line()) < 1e-3  # it waits for nobody; scripts/bench measures the nanoseconds
            with pytest.raises(asyncio.TimeoutError):
                await readable(worker.pidfd, 2.0)  # over its limit, and by more than LATE_S
            resumed_s = time.monotonic()
            os.kill(rig.pid, signal.SIGCONT)
            message = await rig.hang()
            assert message["deadline_s"] >= resumed_s + 0.49

    run(story())


def test_rss_and_modules():
    async def story():
        async with Rig() as rig:
            worker = rig.worker("client.init_workload_monitoring(); say('up'); sys.stdin.readline()")
            await worker.line()
            assert int(status(rig.pid)["VmRSS"].split()[0]) <= 12 * 1024

    run(story())
