"""`nvrx health serve`: who may ask it, by credentials that the kernel tells, and what those do who only disturb."""

from __future__ import annotations

import grp
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from nvhcd_harness import BOUND_S, Daemon
from recorded import ended

from nvrx_slurm.health.service import nvhcd_pb2 as pb
from nvrx_slurm.health.service import peers as peers

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

NOBODY, OTHER = 65534, 65533
# Everything is imported as root, who can read it; then it becomes UID, with group GID and GROUPS.
ASK_AS = """
import os, sys
from nvrx_slurm.health.checks import node_service
node_service.preload()
uid, gid, *groups = map(int, sys.argv[2:])
os.setgroups(groups)
os.setresgid(gid, gid, gid)
os.setresuid(uid, uid, uid)
try:
    print("well" if node_service.call(sys.argv[1], 30.0).success else "sick")
except ValueError as error:
    print(error)
"""
# Connects COUNT times as UID, says how many of these the daemon speaks to, and keeps them until its input ends.
HOLD_AS = """
import os, select, socket, sys
path, uid, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
os.setresuid(uid, uid, uid)
spoken = 0
held = []
for _ in range(count):
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(60)
    one.connect(path)
    try:
        if first:
            one.sendall(first)
        spoken += bool(one.recv(1))
    except OSError:
        pass
    held.append(one)
print(spoken, flush=True)
sys.stdin.read()
"""


def ask_as(daemon: Daemon, uid: int, gid: int = NOBODY, *groups: int) -> str:
    argv = [sys.executable, "-c", ASK_AS, str(daemon.socket), *map(str, (uid, gid, *groups))]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=BOUND_S, check=True).stdout.strip()


@contextmanager
def held_as(daemon: Daemon, uid: int, count: int, first: bytes = b"") -> Iterator[int]:
    """So many connections of a user that begin with `first`; how many the daemon spoke to."""
    argv = [sys.executable, "-I", "-c", HOLD_AS, str(daemon.socket), str(uid), str(count), first.hex()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.communicate(timeout=BOUND_S)


def refused(log: str) -> int:
    (line,) = [line for line in log.splitlines() if "stopping; " in line]
    return int(line.partition("stopping; ")[2].split()[0])


def files_of(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


# --- who may ask ------------------------------------------------------------------------------------------------------


@root_only
@pytest.mark.parametrize(
    ("settings", "who", "allowed"),
    [
        ({}, (NOBODY,), True),
        ({"users": []}, (NOBODY,), False),
        ({"users": []}, (0,), True),
        ({"users": [NOBODY]}, (NOBODY,), True),
        ({"users": [str(OTHER), "nobody"]}, (NOBODY,), True),
        ({"users": [OTHER]}, (NOBODY,), False),
        ({"users": [OTHER], "group": "daemon"}, (OTHER,), True),
        ({"users": [], "group": "daemon"}, (NOBODY,), False),
        ({"users": [], "group": "daemon"}, (NOBODY, grp.getgrnam("daemon").gr_gid), True),
        ({"users": [], "group": "daemon"}, (NOBODY, NOBODY, 7001, grp.getgrnam("daemon").gr_gid), True),
        ({"users": [], "group": "daemon"}, (NOBODY, NOBODY, *range(7000, 7400)), False),
        ({"users": [], "group": "daemon"}, (NOBODY, 0, *range(7000, 7400), grp.getgrnam("daemon").gr_gid), True),
        ({"group": "daemon"}, (NOBODY, NOBODY, grp.getgrnam("daemon").gr_gid), True),
    ],
    ids=lambda value: str(value) if len(str(value)) < 100 else f"{len(value)} numbers",
)
def test_who_may_ask(daemon: Daemon, settings: dict[str, Any], who: tuple[int, ...], allowed: bool) -> None:
    daemon.settings |= settings
    daemon.start("echo ran >> log")
    said = ask_as(daemon, *who)
    log = daemon.stop()
    assert daemon.lines("log") == (["ran"] if allowed else []), said
    assert refused(log) == (0 if allowed else 1)
    if allowed:
        assert said == "well" and f"uid {who[0]} asked with" in log
    else:
        assert said.startswith(f"no answer from {daemon.socket}: unavailable: ")
        assert f"refused a connection: uid {who[0]} (pid " in log


# The daemon as nobody. What it imports late is imported as root, who can read it.
SERVE_AS_NOBODY = """
import os, sys
import encodings.utf_8_sig, tempfile, yaml
from nvrx_slurm.config import files
from nvrx_slurm.health.checks import node_service
from nvrx_slurm.health.service import daemon as nvhcd_daemon
node_service.preload()
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sys.exit(nvhcd_daemon.main(sys.argv[1]))
"""


@root_only
def test_a_daemon_of_a_user_answers_him_and_root(daemon: Daemon) -> None:
    """Whether its script can be run is another matter: this Python may be root's alone."""
    file = daemon.dir / "nvhcd.yaml"
    daemon.settings |= {"users": [], "healthcheck_path": "/bin/true"}
    file.write_text(json.dumps(daemon.settings))
    os.chown(daemon.dir, NOBODY, -1)
    daemon.process = subprocess.Popen(
        [sys.executable, "-c", SERVE_AS_NOBODY, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    daemon.wait_for("listening on")
    said = [ask_as(daemon, uid) for uid in (NOBODY, 0, OTHER)]
    log = daemon.stop()
    assert f"uid {NOBODY} asked with" in log and "uid 0 asked with" in log and f"uid {OTHER} asked with" not in log
    assert refused(log) == 1 and "unavailable" not in said[0] + said[1] and "unavailable" in said[2]


@root_only
def test_each_refusal_is_counted_and_not_each_is_a_line(daemon: Daemon) -> None:
    daemon.settings["users"] = []
    daemon.start("echo ran >> log")
    with held_as(daemon, NOBODY, 100) as spoken:
        assert spoken == 0
    assert daemon.answer().success
    log = daemon.stop()
    assert refused(log) == 100
    assert 1 <= log.count("refused a connection") <= 5
    assert daemon.lines("log") == ["ran"]


def test_nobody_gets_in_behind_the_door(daemon: Daemon) -> None:
    """gRPC's own socket has no name in any directory."""
    daemon.start("")
    assert sorted(path.name for path in daemon.dir.iterdir()) == ["check.sh", "nvhcd.yaml", "s"]
    daemon.stop()


# --- those who only disturb -------------------------------------------------------------------------------------------


@root_only
def test_a_thousand_connections_of_one_user_harm_only_him(daemon: Daemon) -> None:
    daemon.start("")
    with held_as(daemon, NOBODY, 1000) as spoken:
        assert spoken == peers.MAX_CONNECTIONS_PER_USER
        assert ask_as(daemon, OTHER) == "well" and ask_as(daemon, 0) == "well"
        assert ask_as(daemon, NOBODY).startswith(f"no answer from {daemon.socket}: unavailable: ")
    log = daemon.stop()
    assert refused(log) >= 1000 - spoken + 1
    assert f"uid {NOBODY} (pid " in log and "has 32 connections already" in log


@root_only
def test_many_users_together_cannot_keep_root_out(daemon: Daemon) -> None:
    daemon.start("")
    users = range(70001, 70001 + peers.MAX_CONNECTIONS // peers.MAX_CONNECTIONS_PER_USER)
    with ExitStack() as stack:
        for uid in users:
            spoken = stack.enter_context(held_as(daemon, uid, peers.MAX_CONNECTIONS_PER_USER))
            assert spoken == peers.MAX_CONNECTIONS_PER_USER
        assert ask_as(daemon, NOBODY) != "well"
        assert daemon.answer().success
    assert "is one too many: 256 connections are open" in daemon.stop()


@root_only
def test_the_questions_of_one_user_leave_room_for_others(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    daemon.start("read x < go")
    with daemon.connected(5) as asks:
        calls = [asks[0].future(pb.HealthCheckRequest(), timeout=BOUND_S)]
        daemon.wait_for("running ")
        for n, ask in enumerate(asks[1:]):
            calls.append(ask.future(pb.HealthCheckRequest(args=[str(n)]), timeout=BOUND_S))
        daemon.wait_for("asked with", 4)
        assert daemon.error("more") == ("UNAVAILABLE", "too many different health checks are waiting")
        argv = [sys.executable, "-c", ASK_AS, str(daemon.socket), str(NOBODY), str(NOBODY)]
        other = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        daemon.wait_for(f"uid {NOBODY} asked with")
        for _ in range(6):
            with open(daemon.dir / "go", "w") as go:
                go.write("\n")
            daemon.wait_for("exit code 0")
        assert other.communicate(timeout=BOUND_S)[0] == "well\n"
        assert all(call.result().success for call in calls)
    daemon.stop()


# As UID: asks with ARGS, says how that ended.
ASKS_AS = """
import os, sys
import grpc
from nvrx_slurm.health.checks import node_service
from nvrx_slurm.health.service import nvhcd_pb2 as pb
uid, args = int(sys.argv[2]), sys.argv[3:]
os.setresuid(uid, uid, uid)
with grpc.insecure_channel(f"unix:{sys.argv[1]}") as channel:
    ask = channel.unary_unary(
        node_service.METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
    )
    try:
        print(ask(pb.HealthCheckRequest(args=args), timeout=60).success)
    except grpc.RpcError as error:
        print(error.details())
"""


@root_only
def test_a_user_who_asks_all_the_time_holds_nobody_up(daemon: Daemon) -> None:
    """Of his questions one waits; those of root and of others are answered before it."""
    third = OTHER - 1
    os.mkfifo(daemon.dir / "go")
    daemon.start('echo "$1" >> order; read x < go')
    with ExitStack() as stack:

        def asks(uid: int, word: str) -> subprocess.Popen[str]:
            argv = [sys.executable, "-c", ASKS_AS, str(daemon.socket), str(uid), word]
            client = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            daemon.wait_for(f"uid {uid} asked with")
            return client

        users = [asks(NOBODY, "his-1")]
        daemon.wait_for("running ")
        users += [asks(NOBODY, "his-2")]
        refused = asks(NOBODY, "his-3")
        assert refused.communicate(timeout=BOUND_S)[0] == "too many different health checks are waiting\n"
        users += [asks(OTHER, "other"), asks(third, "third")]
        root = [daemon.ask.future(pb.HealthCheckRequest(args=[word]), timeout=BOUND_S) for word in ("root", "third")]
        daemon.wait_for("uid 0 asked with", 2)
        for _ in range(5):
            with open(daemon.dir / "go", "w") as go:
                go.write("\n")
            daemon.wait_for("exit code 0")
        assert [client.communicate(timeout=BOUND_S)[0] for client in users] == ["True\n"] * 4
        assert all(call.result().success for call in root)
    first, *roots, other, last = daemon.lines("order")
    assert (first, {*roots}, other, last) == ("his-1", {"root", "third"}, "other", "his-2")
    daemon.stop()


# Many users ask, then root, and only then is anything run: what the last user and root are told.
MANY_USERS = """
import asyncio
from nvrx_slurm.health.service import runs as runs

async def main():
    all_of_them = runs.Runs(runs.Script("/bin/true"), 60.0, {})
    asked = [asyncio.create_task(all_of_them.ask((str(n),), 1000 + n)) for n in range(runs.MAX_QUEUED)]
    await asyncio.sleep(0)
    print((await all_of_them.ask(("more",), 5000)).status)
    asked.append(asyncio.create_task(all_of_them.ask(("root",), 0)))
    working = asyncio.create_task(all_of_them.work())
    print(all(answer.success for answer in await asyncio.gather(*asked)))
    await all_of_them.stop(working)

asyncio.run(main())
"""


def test_the_questions_of_many_users_leave_room_for_roots() -> None:
    argv = [sys.executable, "-c", MANY_USERS]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=BOUND_S, check=True)
    assert done.stdout.split() == ["UNAVAILABLE", "True"]


def test_without_file_descriptors_it_waits_for_some(daemon: Daemon) -> None:
    daemon.settings["log_level"] = "info"
    daemon.start("")
    assert daemon.answer().success
    assert daemon.process is not None
    before = files_of(daemon)
    soft, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (before + 9, hard))
    with ExitStack() as stack:
        for _ in range(60):
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.settimeout(BOUND_S)
            peer.connect(str(daemon.socket))
        daemon.wait_for("Too many open files")
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert daemon.answer().success
    forgotten(daemon, before)
    assert "never retrieved" not in daemon.stop()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def until_closed(peer: socket.socket) -> None:
    """Read to the end, within the bound."""
    peer.settimeout(BOUND_S)
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        return


@pytest.mark.parametrize(
    ("sends", "closes"),
    [
        (b"", False),
        (PREFACE[:7], False),
        (b"\xff" * 100_000, False),
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (PREFACE + b"\xff" * 9, False),
        (PREFACE, True),
        (b"", True),
    ],
    ids=["silent", "stops in the middle", "junk", "HTTP/1", "junk later", "half-closes", "half-closes at once"],
)
def test_who_says_nothing_of_use_is_hung_up_on(daemon: Daemon, sends: bytes, closes: bool) -> None:
    daemon.start("")
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.socket))
        try:
            peer.sendall(sends)
        except (BrokenPipeError, ConnectionResetError):  # it has heard enough
            pass
        if closes:
            peer.shutdown(socket.SHUT_WR)
        until_closed(peer)
        assert daemon.answer().success
    daemon.stop()


def test_nothing_is_left_of_those_who_end_abruptly(daemon: Daemon) -> None:
    daemon.settings["log_level"] = "info"  # few lines, as nobody reads them meanwhile
    daemon.start("")
    daemon.answer()
    before = files_of(daemon)
    for n in range(100):
        with ExitStack() as stack:
            for _ in range(3):
                peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                peer.settimeout(BOUND_S)
                peer.connect(str(daemon.socket))
                if n % 3:
                    assert peer.recv(1)
                if n % 3 == 2:
                    peer.sendall(PREFACE)
        if n % 9 == 8:
            forgotten(daemon, before)
    forgotten(daemon, before)
    assert refused(daemon.stop()) == 0


def forgotten(daemon: Daemon, before: int) -> None:
    """Its files are as few as before, at the latest after it has answered many a question."""
    for _ in range(200):
        if files_of(daemon) <= before:
            return
        assert daemon.answer().success
    raise AssertionError(f"{files_of(daemon)} files are open instead of {before}")


def test_a_peer_that_does_not_read_holds_nobody_up_at_the_end(daemon: Daemon) -> None:
    """Its pings are answered until nothing more goes through; SIGTERM ends the daemon all the same."""
    daemon.start("")
    ping = (8).to_bytes(3, "big") + b"\x06\0\0\0\0\0" + b"12345678"
    settings = (0).to_bytes(3, "big") + b"\x04\0\0\0\0\0"
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(2.0)
        peer.connect(str(daemon.socket))
        sent = 0
        try:
            peer.sendall(PREFACE + settings)
            while sent < 64 << 20:
                sent += peer.send(ping * 4096)
        except OSError:  # it takes no more, or hung up
            pass
        assert sent
        assert daemon.answer().success
        daemon.stop()


def test_sigterm_with_silent_peers_and_a_run_under_way(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "ready")
    daemon.start("echo $$ > own; echo > ready; exec sleep 600")
    asking = daemon.ask.future(pb.HealthCheckRequest(), timeout=BOUND_S)
    with open(daemon.dir / "ready") as ready:
        ready.readline()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(BOUND_S)
        silent.connect(str(daemon.socket))
        assert silent.recv(1)
        daemon.stop()
        until_closed(silent)
    assert asking.details() == "the service was stopped", "the last answers are passed on"
    assert ended(int(*daemon.lines("own")))
