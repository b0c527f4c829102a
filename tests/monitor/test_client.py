"""RankMonitorClient as a training script sees it."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from monitor_harness import ROOT, Rig

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("FT_RANK_MONITOR_IPC_SOCKET", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_it_says_how_to_start():
    client = RankMonitorClient()
    with pytest.raises(RankMonitorClientError, match="start the script with nvrx-run"):
        client.init_workload_monitoring()
    with pytest.raises(RankMonitorClientError, match="needs init_workload_monitoring"):
        client.send_heartbeat()
    client.shutdown_workload_monitoring()  # nothing to do
    assert not client.is_initialized and client.cfg is None and client.rank_info is None


def test_bad_environment_is_one_sentence(monkeypatch):
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/nonexistent/socket")
    with pytest.raises(RankMonitorClientError, match="RANK is not set"):
        RankMonitorClient().init_workload_monitoring()
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(RankMonitorClientError, match="RANK in the environment must be an integer, not 'three'"):
        RankMonitorClient().init_workload_monitoring()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(RankMonitorClientError, match="no rank monitor listens at /nonexistent/socket"):
        RankMonitorClient().init_workload_monitoring()
    monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", "/" + "x" * 200)
    with pytest.raises(RankMonitorClientError, match="cannot be reached"):
        RankMonitorClient().init_workload_monitoring()
    for bad in (-1, 1.5, True, "5"):
        with pytest.raises(RankMonitorClientError, match="num_warmup_iters must be an integer >= 0"):
            RankMonitorClient().init_workload_monitoring(bad)


def test_what_a_rank_learns_and_how_it_ends():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring(num_warmup_iters=5)
                info = client.rank_info
                say(info.global_rank, info.local_rank, info.pid == os.getpid(), len(info.host) > 0)
                say(client.cfg.rank_heartbeat_timeout, client.cfg.safety_factor, client.cfg.rank_termination_signal)
                for code in (
                    "client.cfg.rank_heartbeat_timeout = 1", "client.cfg.nonsense", "client.init_workload_monitoring()"
                ):
                    try:
                        exec(code)
                        say("no error")
                    except Exception as error:
                        say(type(error).__name__)
                client.shutdown_workload_monitoring()
                client.init_workload_monitoring()
                client.send_heartbeat()
                say(client.is_initialized)
                """,
                rank_heartbeat_timeout=30.0,
            )
            assert await worker.line() == "3 0 True True"
            assert await worker.line() == "30.0 5.0 9"
            assert [await worker.line() for _ in range(3)] == [
                "AttributeError",
                "AttributeError",
                "RankMonitorClientError",
            ]
            assert await worker.line() == "True"
            assert await worker.ended() == 0

    asyncio.run(story())


def test_after_shutdown_and_init_the_limits_run_again():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                for _ in range(2):
                    client.init_workload_monitoring()
                    client.send_heartbeat()
                    client.shutdown_workload_monitoring()
                client.init_workload_monitoring()
                threading.Event().wait()
                """,
                initial_rank_heartbeat_timeout=0.3,
            )
            assert (await rig.hang())["sentence"].startswith("no first heartbeat for 0.3")
            await worker.ended()

    asyncio.run(story())


def test_a_forked_child_cannot_beat_for_its_rank():
    """The child tries all the time; the rank hangs; it is found all the same."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.send_heartbeat()
                if os.fork() == 0:
                    while True:
                        try:
                            client.send_heartbeat()
                            say("the child beats")
                        except RankMonitorClientError as error:
                            say(error)
                        sys.stdin.readline()
                threading.Event().wait()
                """,
                rank_heartbeat_timeout=0.5,
            )
            assert "not in one forked from it" in await worker.line()
            assert (await rig.hang())["sentence"].startswith("no heartbeat for 0.5")
            await worker.ended()

    asyncio.run(story())


def test_import_is_light():
    """What it must not pull in; scripts/bench measures the milliseconds."""
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r})\n"
        "import nvrx_slurm.fault_tolerance\n"
        "print([name for name in ('torch', 'grpc', 'asyncio', 'dataclasses') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-I", "-c", code], text=True, timeout=20) == "[]\n"
