"""Strangers at the rank's socket: whatever they send, hold or flood, the rank and its verdict stay what they are."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
from typing import Any

import pytest
from monitor_harness import WAIT_S, Rig, status

from nvrx_slurm.monitor import requests, wire

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
INIT_AND_HANG = "client.init_workload_monitoring(); client.send_heartbeat(); say('init'); threading.Event().wait()"


async def ask(path: str, data: bytes, fds: tuple[int, ...] = ()) -> dict[str, Any] | None:
    """What the monitor answers to `data`; None if it only hangs up."""

    def blocking() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WAIT_S)
            sock.connect(path)
            try:
                socket.send_fds(sock, [data], list(fds))
                sock.shutdown(socket.SHUT_WR)
                return sock.recv(65536)
            except OSError:
                return b""

    reply = await asyncio.to_thread(blocking)
    return json.loads(reply) if reply else None


def line(**message: object) -> bytes:
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"


LONG = "\u00e9" * 20_000  # three times as long as JSON
QUOTED = [
    line(v=1, type="limits", rank_section_timeouts={LONG: "x"}),
    line(v=1, type="limits", rank_section_timeouts={"step": LONG}),
    line(v=1, type="limits", rank_heartbeat_timeout=[LONG]),
    line(v=1, type=LONG),
    line(v=LONG, type="init"),
    line(v=1, type="limits", **{LONG: 1}),
    line(v=1, type="control", action=[LONG], description="why"),
    line(v=1, type="control", action="Continue", description=LONG),
]


def test_a_refusal_that_quotes_a_long_request_is_still_one_answer() -> None:
    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(INIT_AND_HANG, rank_heartbeat_timeout=3.0, rank_section_timeouts={"step": 9.0})
            assert await worker.line() == "init"
            pid, path = rig.pid, rig.monitor.worker_env()[SOCKET]
            for data in QUOTED:
                reply = await ask(path, data)
                assert reply is not None and reply["type"] == "error" and len(reply["error"]) <= 500
            assert (await rig.hang())["sentence"].startswith("no heartbeat for 3.0")
            await worker.ended()
            assert rig.pid == pid

    asyncio.run(story())


def damaged(seed: int) -> bytes:
    """A request with some bytes changed, doubled, moved or left out; never a whole one that changes something."""
    rng = random.Random(seed)
    data = bytearray(
        rng.choice(
            [
                b'{"v":1,"type":"init","rank":3,"local_rank":0}\n',
                b'{"v":1,"type":"limits","rank_heartbeat_timeout":12.5,"rank_section_timeouts":{"step":1}}\n',
                b'{"v":1,"type":"control","action":"Continue","description":"why"}\n',
                b'{"v":1,"type":"ok","cycle":0,"cfg":{}}\n',
            ]
        )
    )
    for _ in range(rng.randint(1, 4)):
        at, what = rng.randrange(len(data)), rng.randrange(4)
        if what == 0:
            data[at] = rng.randrange(256)
        elif what == 1:
            del data[at : at + rng.randint(1, 9)]
        elif what == 2:
            data[at:at] = data[: rng.randint(1, 30)] * rng.randint(1, 40)
        else:
            data[at:at] = rng.choice([b"\0", b"\n", b"\xff\xfe", b"1e999", b"NaN", b"[" * 2000, b'"', b"-"])
        if not data:
            data += b"\n"
    return bytes(data) if rng.random() < 0.8 else bytes(data).replace(b"\n", b"")


def test_damaged_requests_end_no_monitor() -> None:
    """What is still a request may be obeyed: its sender is this user. Anything else is answered or hung up on."""

    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(INIT_AND_HANG, rank_section_timeouts={"step": None})
            assert await worker.line() == "init"
            pid, path = rig.pid, rig.monitor.worker_env()[SOCKET]
            kinds = [reply and reply["type"] for reply in [await ask(path, damaged(seed)) for seed in range(600)]]
            assert kinds.count("error") > 100 and set(kinds) <= {"error", "ok", None}
            assert rig.pid == pid and not rig.hangs

    asyncio.run(story())


def test_file_descriptors_of_strangers_are_not_kept() -> None:
    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(INIT_AND_HANG)
            assert await worker.line() == "init"
            path = rig.monitor.worker_env()[SOCKET]
            before = len(os.listdir(f"/proc/{rig.pid}/fd"))
            null = os.open(os.devnull, os.O_RDONLY)
            try:
                for _ in range(20):
                    reply = await ask(path, b'{"v":1,"type":"are you there"}\n', (null,) * 200)
                    assert reply is not None and "does not know" in reply["error"]
            finally:
                os.close(null)
            assert len(os.listdir(f"/proc/{rig.pid}/fd")) <= before + 1  # the last connection is about to be closed

    asyncio.run(story())


def test_a_slow_peer_is_hung_up_on_however_often_it_sends_a_byte() -> None:
    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker("sys.stdin.readline(); " + INIT_AND_HANG)
            path = rig.monitor.worker_env()[SOCKET]
            peers = [await asyncio.open_unix_connection(path) for _ in range(requests.MAX_CONNECTIONS)]
            worker.tell("go")
            assert await worker.line() == "init"  # the oldest of them gave way
            ended = sum([await sends_until_hung_up(reader, writer) for reader, writer in peers])
            assert ended == len(peers)
            assert status(rig.pid)["State"].startswith("S")

    asyncio.run(story())


async def sends_until_hung_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """A byte every 50 ms until the monitor has hung up, which it must do in time."""
    gone = asyncio.ensure_future(reader.read())
    deadline_s = asyncio.get_running_loop().time() + WAIT_S
    while not gone.done() and asyncio.get_running_loop().time() < deadline_s:
        if not writer.is_closing():
            writer.write(b"{")
        await asyncio.wait({gone}, timeout=0.05)
    hung_up = gone.done() and (gone.exception() is not None or gone.result() == b"")
    gone.cancel()
    writer.close()
    return hung_up


SWARM = """
import resource, socket, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
lines = [b"", b"{", b'{"v":1,"type":"are you there"}\\n', b"x" * 70000, b"\\0" * 9 + b"\\n"]
sockets = []
for n in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])  # waits while the backlog is full of others
    sock.setblocking(False)
    try:
        sock.send(lines[n % len(lines)])
    except OSError:
        pass
    sockets.append(sock)
    if n == 50:
        print("swarming", flush=True)
print(len(sockets), flush=True)
sys.stdin.read()
"""


def test_ten_thousand_connections_held_at_once_change_nothing_for_the_rank() -> None:
    """Four peers connect as fast as they can and let nothing go; the rank goes through many lives among them."""
    rank = """
        while not sys.stdin.readline().startswith("end"):
            for _ in range(20):
                client.init_workload_monitoring()
                for _ in range(50):
                    client.send_heartbeat()
                    client.start_section("step"); client.end_section("step")
                client.shutdown_workload_monitoring()
            say("lived")
        client.init_workload_monitoring()
        client.send_heartbeat()
        threading.Event().wait()
    """

    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(rank, rank_heartbeat_timeout=4.0, rank_section_timeouts={"step": 4.0})
            pid, path = rig.pid, rig.monitor.worker_env()[SOCKET]
            swarm = [
                await asyncio.create_subprocess_exec(
                    sys.executable, "-c", SWARM, path, "2500", stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                for _ in range(4)
            ]
            try:
                for peer in swarm:
                    assert peer.stdout and await asyncio.wait_for(peer.stdout.readline(), WAIT_S) == b"swarming\n"
                held = [asyncio.ensure_future(peer.stdout.readline()) for peer in swarm if peer.stdout]
                lived = 0
                while not all(future.done() for future in held) or not lived:
                    worker.tell("go")
                    said = await worker.line()
                    assert said == "lived", worker.err.read_text()
                    lived += 1
                assert [await future for future in held] == [b"2500\n"] * 4
                worker.tell("end")
                message = await rig.hang()
                assert message["sentence"].startswith("no heartbeat for 4.0")
                await worker.ended()
                assert rig.pid == pid and len(rig.hangs) == 1
            finally:
                for peer in swarm:
                    peer.kill()
                    await peer.wait()

    asyncio.run(story())


@pytest.mark.parametrize("way", ["client", "monitor"])
def test_another_version_is_refused_in_one_sentence(way: str) -> None:
    """The client's own code of another version; and a client that gets an answer of another version."""
    changed = "wire.VERSION = 2" if way == "client" else "decode = wire.decode; wire.decode = other"
    code = f"""
        from nvrx_slurm.monitor import wire
        def other(line):
            return decode(line.replace(b'"v":1', b'"v":2'))
        {changed}
        try:
            client.init_workload_monitoring()
        except RankMonitorClientError as error:
            say(client.is_initialized, error)
        try:
            client.send_heartbeat()
        except RankMonitorClientError as error:
            say(error)
    """

    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(code)
            said = await worker.line()
            versions = "this side speaks version 2, the other 1" if way == "client" else "version 1, the other 2"
            assert said.startswith("False the rank monitor refused 'init': ") and versions in said
            assert said.endswith("use the same nvrx_slurm for the launcher and the training script")
            assert "init_workload_monitoring() first" in await worker.line()
            assert await worker.ended() == 0

    asyncio.run(story())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_other_users_get_no_answer() -> None:
    """Even where the directory and the socket were left open to them by mistake."""
    code = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b'{"v":1,"type":"init"}\\n')
print(sock.recv(65536))
"""

    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker("sys.stdin.readline(); " + INIT_AND_HANG, rank_init_timeout=4.0)
            path = rig.monitor.worker_env()[SOCKET]
            await rig.settled()
            command = [sys.executable, "-c", code, path]
            for mode, outcome in ((0o700, "PermissionError"), (0o711, "b''")):
                os.chmod(path, 0o777)
                os.chmod(rig.dir, mode)
                done = await asyncio.to_thread(
                    subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S, check=False
                )
                assert outcome in done.stdout + done.stderr
            assert (await rig.hang())["sentence"].startswith("no init_workload_monitoring() for 4.0")
            await worker.ended()

    asyncio.run(story())


def test_the_bound_of_a_line_is_that_of_its_bytes() -> None:
    with pytest.raises(wire.WireError, match="over the limit of 65536"):
        wire.encode("limits", name="x" * wire.MAX_LINE_BYTES)
    with pytest.raises(wire.WireError, match="over the limit of 65536"):
        wire.decode(b" " * (wire.MAX_LINE_BYTES + 1))
