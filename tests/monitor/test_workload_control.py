"""Workload control from the rank to its agent: what is passed on, what is refused, and what if somebody is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest
from monitor_harness import ROOT, WAIT_S, Rig, kill_monitor, status, until

from nvrx_slurm.fault_tolerance import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvrx_slurm.monitor import wire
from nvrx_slurm.monitor.forwarding import MAX_CONTINUES, Forwarding
from nvrx_slurm.monitor.main import Monitor
from nvrx_slurm.testing import standalone_monitor

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"

ASK = """
from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest
from nvrx_slurm.monitor import transport
def ask(action, *description):
    try:
        client.send_workload_control_request(WorkloadControlRequest(action, *description))
        say("ok")
    except Exception as error:
        say(type(error).__name__, error)
client.init_workload_monitoring()
"""


def asking(code: str) -> str:
    """A worker's code with `ask(action, description)`, which says what became of it."""
    return ASK + textwrap.dedent(code)


def asked(rig: Rig) -> tuple[WorkloadAction, str]:
    """What the agent has been told; it was there before the rank got its answer."""
    rig.monitor.hear()
    return rig.asked.get_nowait()


def test_the_wire_knows_the_actions():
    assert tuple(action.name for action in WorkloadAction) == wire.ACTIONS


@pytest.mark.parametrize("action", WorkloadAction)
def test_a_request_reaches_the_agent_before_the_rank_goes_on(action):
    async def story():
        async with Rig() as rig:
            worker = rig.worker(asking(f"ask(WorkloadAction.{action.name}, 'the GPU\\n is hot \\u00e9')"))
            assert await worker.line() == "ok"
            assert asked(rig) == (action, "the GPU\n is hot \u00e9")

    asyncio.run(story())


def test_descriptions_are_bounded_and_can_be_sent_on():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                asking("""
                ask(WorkloadAction.Continue)
                ask(WorkloadAction.ExcludeThisNode, chr(0x1F525) * 1000000)  # 12 bytes each on the wire
                ask(WorkloadAction.ShutdownWorkload, os.fsdecode(b"caf\\xe9"))
                """)
            )
            assert [await worker.line() for _ in range(3)] == ["ok"] * 3
            assert asked(rig) == (WorkloadAction.Continue, "<not set>")
            assert asked(rig)[1] == "\U0001f525" * wire.MAX_DESCRIPTION_CHARS
            assert asked(rig)[1] == "caf?"  # a lone surrogate fits into no log and no protobuf

    asyncio.run(story())


def test_before_its_exit_is_judged_all_that_a_rank_asked_for_is_known():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(asking("ask(WorkloadAction.ExcludeThisNode, 'x')\nos._exit(3)"))
            assert worker.process.wait(WAIT_S) == 3  # our loop has run nothing since
            assert rig.asked.empty()
            rig.monitor.hear()
            assert rig.asked.get_nowait() == (WorkloadAction.ExcludeThisNode, "x")

    asyncio.run(story())


def test_of_a_former_life_nothing_is_taken():
    """What a monitor said of a worker that is gone is not held against the next one."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(asking("ask(WorkloadAction.ShutdownWorkload)\nos._exit(0)"))
            assert worker.process.wait(WAIT_S) == 0
            rig.monitor.unwatch()
            rig.worker("threading.Event().wait()", cycle=1)
            rig.monitor.hear()
            assert rig.asked.empty()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"action": "Explode", "description": "x"}, "there is no workload action 'Explode'"),
        ({"action": ["Continue"], "description": "x"}, "there is no workload action"),
        ({"description": "x"}, "there is no workload action 'None'"),
        ({"action": "Continue"}, "a description must be a string of up to 4000 characters"),
        ({"action": "Continue", "description": 7}, "a description must be a string"),
        ({"action": "Continue", "description": "x" * 4001}, "a description must be a string"),
    ],
)
def test_what_no_client_sends_is_refused(fields, why):
    async def story():
        async with Rig() as rig:
            rig.worker("threading.Event().wait()")
            path = rig.monitor.worker_env()[SOCKET]
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(wire.encode("control", **fields))
            answer = wire.decode(await asyncio.wait_for(reader.readline(), WAIT_S))
            writer.close()
            assert answer["type"] == "error" and why in str(answer["error"])
            await rig.settled()
            rig.monitor.hear()
            assert rig.asked.empty()

    asyncio.run(story())


def test_a_stopped_monitor_is_waited_for_and_then_given_up():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                asking("""
                say("up")
                sys.stdin.readline()
                transport.REPLY_TIMEOUT_S = 0.3
                ask(WorkloadAction.Continue)
                transport.REPLY_TIMEOUT_S = 30.0
                ask(WorkloadAction.ShutdownWorkload, "in the end")
                """)
            )
            assert await worker.line() == "up"
            os.kill(rig.pid, signal.SIGSTOP)
            until(lambda: status(rig.pid)["State"].startswith("T"), "the monitor is stopped")
            worker.tell("go")
            sentence = await worker.line()
            assert sentence.startswith("RankMonitorClientError the rank monitor at ")
            assert sentence.endswith(" gave no answer within 0.3 s")
            os.kill(rig.pid, signal.SIGKILL)  # its successor takes the second one
            assert await worker.line() == "ok"
            rig.monitor.hear()
            told = [rig.asked.get_nowait() for _ in range(rig.asked.qsize())]
            assert told[-1] == (WorkloadAction.ShutdownWorkload, "in the end")

    asyncio.run(story())


def test_a_killed_monitor_s_successor_takes_requests():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(asking("say('up')\nsys.stdin.readline()\nask(WorkloadAction.Continue, 'x')"))
            assert await worker.line() == "up"
            await kill_monitor(rig)
            worker.tell("go")
            assert await worker.line() == "ok"
            assert asked(rig) == (WorkloadAction.Continue, "x")

    asyncio.run(story())


@pytest.mark.parametrize("length", [1, wire.MAX_DESCRIPTION_CHARS])
def test_continues_leave_room_for_what_matters(length: int) -> None:
    """An agent that is stopped or busy reads nothing: no Continue fails then, and nothing that matters is lost."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                asking(f"""
                long = chr(0x1F525) * {length}  # 12 bytes each on the wire
                for _ in range(400):
                    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.Continue, long))
                for action in ("ExcludeThisNode", "Continue", "ShutdownWorkload", "ExcludeThisNode", "Continue"):
                    ask(WorkloadAction[action], long)
                client.send_heartbeat()
                threading.Event().wait()
                """),
                rank_heartbeat_timeout=0.2,
            )
            # The agent is this process: it runs nothing while it waits here.
            assert [worker.process.stdout.readline() for _ in range(5)] == [b"ok\n"] * 5
            assert worker.process.wait(WAIT_S) < 0  # it hung, which was reported before it was ended
            rig.monitor.hear()
            told = [rig.asked.get_nowait()[0] for _ in range(rig.asked.qsize())]
            continues = told.count(WorkloadAction.Continue)
            assert 0 < continues <= MAX_CONTINUES
            assert told[continues:] == [WorkloadAction.ExcludeThisNode, WorkloadAction.ShutdownWorkload]
            assert rig.hangs and rig.hangs[0]["sentence"].startswith("no heartbeat for 0.2")

    asyncio.run(story())


def test_of_continues_an_agent_gets_a_few_in_each_life():
    async def story():
        async with Rig() as rig:
            for cycle in range(2):
                worker = rig.worker(
                    asking("""
                    for number in range(200):
                        sys.stdin.readline()
                        ask(WorkloadAction.Continue, str(number))
                    """),
                    cycle=cycle,
                )
                told = []
                for _ in range(200):
                    worker.tell("go")
                    assert await worker.line() == "ok"
                    rig.monitor.hear()
                    told += [rig.asked.get_nowait() for _ in range(rig.asked.qsize())]
                assert told == [(WorkloadAction.Continue, str(number)) for number in range(MAX_CONTINUES)]
                assert await worker.ended() == 0
                rig.monitor.unwatch()

    asyncio.run(story())


def test_what_was_asked_for_is_passed_on_once():
    """An agent's log does not grow with a rank that asks in a loop; what is weaker changes nothing any more."""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                asking("""
                for action in ["ExcludeThisNode"] * 50 + ["ShutdownWorkload", "ExcludeThisNode"] * 50:
                    ask(WorkloadAction[action])
                """)
            )
            assert [await worker.line() for _ in range(150)] == ["ok"] * 150
            rig.monitor.hear()
            told = [rig.asked.get_nowait()[0] for _ in range(rig.asked.qsize())]
            assert told == [WorkloadAction.ExcludeThisNode, WorkloadAction.ShutdownWorkload]

    asyncio.run(story())


def test_bad_requests_are_errors_of_the_caller(monkeypatch):
    for name in (SOCKET, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TypeError, match="action must be one of WorkloadAction.Continue, .*, not 'Continue'"):
        WorkloadControlRequest("Continue")
    with pytest.raises(TypeError, match="description must be a string, not int"):
        WorkloadControlRequest(WorkloadAction.Continue, 3)
    request = WorkloadControlRequest(WorkloadAction.Continue)
    assert request.description == "<not set>"
    client = RankMonitorClient()
    needs_init = r"send_workload_control_request\(\) needs init_workload_monitoring\(\) first"
    with pytest.raises(RankMonitorClientError, match=needs_init):
        client.send_workload_control_request(request)
    with standalone_monitor() as monitor:
        client.init_workload_monitoring()
        for wrong in (WorkloadAction.Continue, "Continue", None):
            with pytest.raises(TypeError, match="a WorkloadControlRequest is needed, not "):
                client.send_workload_control_request(wrong)
        client.shutdown_workload_monitoring()
        with pytest.raises(RankMonitorClientError, match=needs_init):
            client.send_workload_control_request(request)
        assert monitor.requests == []


def test_a_standalone_monitor_keeps_requests_for_its_user():
    requests = [WorkloadControlRequest(action, f"for {action.name}") for action in WorkloadAction]
    with standalone_monitor() as monitor:
        client = RankMonitorClient()
        client.init_workload_monitoring()
        with pytest.raises(TimeoutError, match=r"got 0 requests within 0.01 s"):
            monitor.wait_for_request(0.01)
        for request in requests:
            client.send_workload_control_request(request)
        assert monitor.wait_for_request(WAIT_S) == requests[0]
        assert monitor.wait_for_request(WAIT_S, count=3) == requests[2]
        assert monitor.requests == requests
        client.send_heartbeat()  # nothing follows from them here
        client.shutdown_workload_monitoring()


def test_the_parts_are_imported_when_they_are_needed():
    code = f"""
import sys
sys.path.insert(0, {ROOT!r})
import nvrx_slurm.fault_tolerance as ft
assert not {{"torch", "grpc", "dataclasses", "nvrx_slurm.types"}} & set(sys.modules)
request = ft.WorkloadControlRequest(ft.WorkloadAction.Continue)
assert not {{"torch", "grpc", "asyncio"}} & set(sys.modules)
print(request.action.name)
"""
    assert subprocess.check_output([sys.executable, "-I", "-S", "-c", code], timeout=60) == b"Continue\n"


class _NoWorker:
    """What a request is answered by of a watched worker."""

    cycle, pid = 0, 1

    def __init__(self) -> None:
        self.forwarding = Forwarding()


def test_a_monitor_without_its_agent_refuses_what_matters():
    """Between the agent's death and the monitor's own end a rank may still ask."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        monitor, nobody = Monitor(theirs, "/nonexistent", "rank0."), _NoWorker()
        message = {"description": "why"}
        assert monitor._pass_on(nobody, message | {"action": "Continue"}) == wire.encode("ok")
        for action in ("ExcludeThisNode", "ShutdownWorkload", "ShutdownWorkload"):
            with pytest.raises(wire.WireError, match="the launcher cannot be told: it is gone, or"):
                monitor._pass_on(nobody, message | {"action": action})
