"""The rank's socket: refusals, hostile and slow peers, other users; and workload control requests."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from monitor_harness import ask, kill_monitor
from waits import WAIT_S, until

from nvrx_slurm.fault_tolerance import RankMonitorClientError, WorkloadAction, WorkloadControlRequest
from nvrx_slurm.monitor import transport, wire
from nvrx_slurm.monitor.main import MAX_CONTINUES, MonitorProgram

pytestmark = pytest.mark.process


async def asked(path, data, fds=()):
    """The monitor's answer; None if it only hangs up."""
    reply = await asyncio.to_thread(ask, path, data, fds)
    return json.loads(reply) if reply else None


def line(kind="limits", v=1, **message):
    return json.dumps({"v": v, "type": kind, **message}, ensure_ascii=False).encode() + b"\n"


LONG = "\u00e9" * 20_000  # three times as long as JSON
REFUSED = [
    (b'{"v":2,"type":"init"}\n', "speaks version 1, the other 2"),
    (b'{"type":"init"}\n', "version"),
    (b"\x80\x04\x95 pickle\n", "not a JSON"),
    (b"[" * 60000 + b"\n", "not a JSON"),
    (b'{"v":1}\n', "no type"),
    (b'{"v":1,"type":"hang"}\n', "'hang'"),
    (b"x" * 70000, "65536"),
    (line(rank_heartbeat_timeout=-5), "rank_heartbeat_timeout"),
    (line(rank_init_timeout=5), "'rank_init_timeout'"),
    (line(rank_section_timeouts={"other": 5}), "not in rank_section_timeouts"),
    (line(LONG), "does not know"),
    (line("init", v=LONG), "version"),
    (line("control", action="Explode", description="x"), "'Explode'"),
    (line("control", action="Continue", description=7), "description"),
    (line("control", action="Continue", description="x" * 4001), "description"),
]


async def test_refusals_change_nothing(rig):
    """Each refusal is one answer, also where it quotes a long request. File descriptors of peers are not kept."""
    client = rig.rank(rank_section_timeouts={"step": None})
    assert "after init" in (await asked(rig.path, line(rank_heartbeat_timeout=5)) or {})["error"]
    client.init_workload_monitoring()
    pid, path = rig.pid, rig.path
    for data, token in REFUSED:
        reply = await asked(path, data)
        assert reply["type"] == "error" and len(reply["error"]) <= 500, data[:40]
        assert token in reply["error"], data[:40]
    rig.monitor.hear()
    assert rig.asked.empty()
    before = len(os.listdir(f"/proc/{pid}/fd"))
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(5):
        assert await asked(path, b'{"v":1,"type":"are you there"}\n', (null,) * 200)
    os.close(null)
    await asyncio.to_thread(until, lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, "all files are closed")
    assert rig.pid == pid and not rig.hangs


async def test_senders_that_read_no_answer_delay_neither_requests_nor_the_kill(rig):
    client = rig.rank(rank_heartbeat_timeout=0.2)
    rig.stop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, open(os.devnull) as null:
        sock.connect(rig.path)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            for number in range(10_000):  # until the queue is full; the answer has nowhere to go
                socket.send_fds(sock, [b"x"], [null.fileno()] if number % 2 else [])
    os.kill(rig.pid, signal.SIGCONT)
    client.init_workload_monitoring()
    client.send_heartbeat()
    assert (await rig.sentence()).startswith("no heartbeat for ")
    client.shutdown_workload_monitoring()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
async def test_other_users_get_no_answer(rig):
    """Even where the directory and the socket are open to them by mistake."""
    code = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sock.connect(sys.argv[1])
socket.send_fds(sock, [b'{"v":1,"type":"init"}\\n'], [theirs.fileno()])
theirs.close()
print(ours.recv(65536))
"""
    rig.rank(rank_init_timeout=60.0)
    await rig.settled()
    command = [sys.executable, "-I", "-S", "-c", code, rig.path]
    for mode, outcome in ((0o700, "PermissionError"), (0o711, "b''")):
        os.chmod(rig.path, 0o777)
        os.chmod(rig.dir, mode)
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert outcome in done.stdout + done.stderr


def request(action, *description):
    return WorkloadControlRequest(WorkloadAction[action], *description)


def heard(rig):
    """What the agent was told. A request is there before the rank gets its answer."""
    rig.monitor.hear()
    said = [rig.asked.get_nowait() for _ in range(rig.asked.qsize())]
    return [(action.name, description) for action, description in said]


def test_the_wire_knows_the_actions():
    assert tuple(action.name for action in WorkloadAction) == wire.ACTIONS


async def test_requests_reach_the_agent_before_the_rank_goes_on(rig):
    """Descriptions are bounded and can be sent on; bad requests are errors of the caller."""
    client = rig.ready()
    for wrong in (("Continue",), (WorkloadAction.Continue, 3)):
        with pytest.raises(TypeError, match="must be"):
            WorkloadControlRequest(*wrong)
    with pytest.raises(TypeError, match="WorkloadControlRequest"):
        client.send_workload_control_request(WorkloadAction.Continue)
    client.send_workload_control_request(request("Continue"))
    assert heard(rig) == [("Continue", "<not set>")]
    client.send_workload_control_request(request("ExcludeThisNode", chr(0x1F525) * 1000000))  # 12 bytes each
    client.send_workload_control_request(request("ShutdownWorkload", os.fsdecode(b"caf\xe9")))
    assert heard(rig) == [
        ("ExcludeThisNode", "\U0001f525" * wire.MAX_DESCRIPTION_CHARS),
        ("ShutdownWorkload", "caf?"),  # a lone surrogate fits into no log and no protobuf
    ]


async def test_a_request_of_an_earlier_cycle_does_not_count_for_the_next(rig):
    for unwatch in (False, True):
        worker = rig.worker(
            """
            from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest
            client.init_workload_monitoring()
            client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "x"))
            os._exit(3)
            """,
            cycle=unwatch,
        )
        assert worker.process.wait(WAIT_S) == 3  # our loop has run nothing since
        assert rig.asked.empty()
        if unwatch:
            rig.monitor.unwatch()
            rig.rank(cycle=2)
        assert heard(rig) == ([] if unwatch else [("ExcludeThisNode", "x")])
        rig.monitor.unwatch()


async def test_a_stopped_monitor_is_waited_for_and_then_given_up(rig, monkeypatch):
    client = rig.ready()
    await kill_monitor(rig)
    client.send_workload_control_request(request("Continue", "to a successor"))
    assert heard(rig) == [("Continue", "to a successor")]
    rig.stop()
    monkeypatch.setattr(transport, "REPLY_TIMEOUT_S", 0.2)
    with pytest.raises(RankMonitorClientError, match=r"within 0\.2 s"):
        client.send_workload_control_request(request("Continue"))
    monkeypatch.undo()
    os.kill(rig.pid, signal.SIGKILL)
    await asyncio.to_thread(client.send_workload_control_request, request("ShutdownWorkload", "in the end"))
    assert heard(rig)[-1] == ("ShutdownWorkload", "in the end")


@pytest.mark.parametrize("length", [1, wire.MAX_DESCRIPTION_CHARS])
async def test_continues_leave_room_for_what_matters(rig, length):
    """A busy agent reads nothing: no Continue fails then, and no other request and no hang is lost."""
    client = rig.ready(rank_heartbeat_timeout=0.2)
    text = chr(0x1F525) * length
    for _ in range(100):
        client.send_workload_control_request(request("Continue", text))
    for action in ["ExcludeThisNode"] * 9 + ["Continue", "ShutdownWorkload", "ExcludeThisNode"] * 9:
        client.send_workload_control_request(request(action, text))
    client.send_heartbeat()
    sleeper = rig._sleepers[-1]
    assert sleeper.wait(WAIT_S) < 0  # killed; this process, the agent, has not run its loop
    found = heard(rig)
    assert len(found[0][1]) == min(length, 600)
    told = [action for action, _ in found]
    assert told == ["Continue"] * MAX_CONTINUES + ["ExcludeThisNode", "ShutdownWorkload"]
    assert rig.hangs and rig.hangs[0]["sentence"].startswith("no heartbeat for ")


@pytest.mark.parametrize("full", [True, False])
def test_a_request_that_the_agent_did_not_get_is_refused_and_can_be_repeated(full):
    """Its channel is full, or it is dead while its monitor has not ended yet."""

    class NoWorker:
        ids, passed_on = {"pid": 1}, []

    agent, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sent = 0
    with agent, control:
        while full:
            try:
                control.send(b"x" * 4000, socket.MSG_DONTWAIT)
                sent += 1
            except BlockingIOError:
                break
        if not full:
            agent.close()
        monitor, worker = MonitorProgram(control, "/nonexistent", "rank0."), NoWorker()

        def ask_for(action):
            return monitor._pass_on(worker, {"action": action, "description": "why" * 1000})

        assert ask_for("Continue") == wire.encode("ok")  # for the log only
        for action in ("ExcludeThisNode", "ShutdownWorkload", "ShutdownWorkload"):
            with pytest.raises(wire.WireError, match="launcher"):
                ask_for(action)
        if full:
            assert sent
            for _ in range(sent):
                agent.recv(4000)
            for _ in range(2):
                assert ask_for("ShutdownWorkload") == wire.encode("ok")
            assert wire.decode(agent.recv(wire.MAX_LINE_BYTES))["action"] == "ShutdownWorkload"
            with pytest.raises(BlockingIOError):
                agent.recv(1, socket.MSG_DONTWAIT)  # told once
