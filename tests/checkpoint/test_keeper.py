"""A real keeper and its ranks: what it holds, whom it refuses, when it ends. No torch."""

import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from waits import WAIT_S

from nvrx_slurm.checkpoint import link
from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint.link import CheckpointError, KeeperGone, Link

pytestmark = pytest.mark.process

MB = 1 << 20


class Node:
    """A launcher that does nothing, and the keeper of its node."""

    def __init__(self, limit=0):
        self.launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.name = f"nvrx-keeper-test-{secrets.token_hex(8)}"
        link.start(self.name, {**os.environ, link.LIMIT: str(limit)}, self.launcher.pid, linger_s=0.5)
        self.join(99).close()  # it has forked by now
        self.pid = self._pid()
        self.pidfd = os.pidfd_open(self.pid)

    def join(self, rank=0, world=1, launcher=0):
        return Link(self.name, m.Join(rank, world, 1, launcher or self.launcher.pid))

    def connect(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(WAIT_S)
        connection.connect("\0" + self.name)
        return connection

    def _pid(self):
        with self.connect() as connection:
            return int(struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def ended(self, within_s=WAIT_S):
        return bool(select.select([self.pidfd], [], [], within_s)[0])

    def close(self):
        end(self.launcher)
        assert self.ended(), "the keeper outlives its launcher"
        os.close(self.pidfd)


def end(process):
    process.kill()
    process.communicate()


@pytest.fixture
def make():
    nodes = []

    def node(*args):
        nodes.append(Node(*args))
        return nodes[-1]

    yield node
    for one in nodes:
        one.close()


@pytest.fixture
def node(make):
    return make()


def begin(one, iteration, size=MB):
    _, fd = one.ask(m.AskSpace(iteration, size), m.Space)
    memory = mmap.mmap(fd, os.fstat(fd).st_size)
    os.close(fd)
    return memory


def save(one, iteration, size=MB):
    memory = begin(one, iteration, size)
    memory[:size] = bytes([iteration]) * size
    one.ask(m.SaveDone(), m.Accepted)
    return memory


def held(one):
    return [iteration for _, iteration in one.ask(m.AskHeld(), m.HeldSaves)[0].saves]


def load(one, iteration):
    saved, fd = one.ask(m.AskSaved((0, iteration)), m.Saved)
    with open(fd, "rb") as file:
        return file.read(saved.size)


def test_two_generations_outlive_the_process_that_saved_them(node):
    one = node.join()
    for iteration in (1, 2, 3):
        save(one, iteration)
    one.close()
    after = node.join()
    assert held(after) == [3, 2]
    assert load(after, 3) == bytes([3]) * MB and load(after, 2) == bytes([2]) * MB
    with pytest.raises(CheckpointError, match="iteration 1 of rank 0 is not here"):
        load(after, 1)


def test_a_rank_that_ends_in_a_save_loses_only_that_generation(node):
    one = node.join()
    save(one, 1)
    save(one, 2)
    torn = begin(one, 3)
    torn[:5] = b"torn!"
    one.close()
    after = node.join()
    assert held(after) == [2]
    save(after, 3)
    torn[:5] = b"late!"  # the process was not dead
    assert load(after, 3) == bytes([3]) * MB


def test_the_newer_process_is_the_rank(node):
    old = node.join()
    save(old, 1)
    begin(old, 2)
    new = node.join()
    assert held(new) == [1]
    with pytest.raises(CheckpointError, match="another process is rank 0"):
        old.ask(m.SaveDone(), m.Accepted)
    save(new, 2)
    assert held(new) == [2, 1]


def test_ranks_do_not_see_each_other(node):
    one, other = node.join(0, 2), node.join(1, 2)
    save(one, 1)
    assert held(other) == []
    save(other, 2)
    assert held(one) == [1] and held(other) == [2]


@pytest.mark.parametrize("at", [0, MB // 2, MB - 1])
def test_a_bit_that_flips_is_found_and_the_generation_before_is_left(node, at):
    one = node.join()
    save(one, 1)
    memory = save(one, 2)
    load(one, 2)  # the checksum is made by now
    memory[at] ^= 1
    with pytest.raises(CheckpointError, match="iteration 2 of rank 0 is damaged"):
        load(one, 2)
    assert held(one) == [1] and load(one, 1) == bytes([1]) * MB


def test_memory_cannot_be_cut_off(node):
    one = node.join()
    _, fd = one.ask(m.AskSpace(1, MB), m.Space)
    with open(fd, "r+b") as file:
        for size in (0, 4 * MB):
            with pytest.raises(OSError):
                os.ftruncate(file.fileno(), size)


def test_too_little_is_said_before_anything_is_written_and_what_is_held_stays(make):
    node = make(6 * MB)
    one = node.join()
    save(one, 1, 2 * MB)
    with pytest.raises(CheckpointError, match="--ft-checkpoint-memory"):
        begin(one, 2, 4 * MB)
    with pytest.raises(CheckpointError, match="G more memory"):
        begin(one, 2, 1 << 60)
    assert held(one) == [1]
    save(one, 2, 2 * MB)
    with pytest.raises(CheckpointError, match="leaves"):
        begin(node.join(1), 1, 2 * MB)


def test_ranks_that_went_elsewhere_make_room(make):
    node = make(5 * MB)
    gone = node.join(0)
    save(gone, 1, 2 * MB)
    gone.close()
    one = node.join(1)
    save(one, 1, 2 * MB)
    assert held(one) == [1] and held(node.join(0)) == []


HOSTILE = {
    "nothing": b"\0",
    "json": b'{"type":"Join"}',
    "long": b"x" * (m.MAX_PACKET_BYTES + 1),
    "unjoined": m.requests.encode(m.AskHeld()),
    "no-rank": m.requests.encode(m.Join(-1, 1, 1, 1)),
    "answer": m.answers.encode(m.Space()),
}
AFTER_JOIN = {
    "twice": m.Join(0, 1, 1, 1),
    "no-bytes": m.AskSpace(1, 0),
    "before-the-first": m.AskSpace(-1, MB),
    "not-begun": m.SaveDone(),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_strangers_are_cut_off_and_others_go_on(node, data):
    one = node.join()
    save(one, 1)
    with node.connect() as connection:
        connection.send(data)
        assert connection.recv(100) == b""
    assert load(one, 1) == bytes([1]) * MB


@pytest.mark.parametrize("request_", AFTER_JOIN.values(), ids=AFTER_JOIN)
def test_a_rank_that_errs_is_cut_off_and_its_states_stay(node, request_):
    one = node.join()
    save(one, 1)
    with pytest.raises(KeeperGone):
        one.ask(request_, m.Accepted)
    assert held(node.join()) == [1]


def test_a_second_one_is_not_started(node):
    link.start(node.name, os.environ, node.launcher.pid)
    assert node._pid() == node.pid


def test_it_outlives_its_launcher_for_another_one_and_then_ends(node):
    one = node.join()
    save(one, 1)
    one.close()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as second:
        end(node.launcher)
        after = node.join(launcher=second.pid)
        assert held(after) == [1]
        assert not node.ended(1.0)  # twice as long as it waits without a launcher
        end(second)
    assert node.ended()


def test_it_goes_on_for_ranks_of_another_launcher_and_does_not_spin(node):
    """The first launcher is not reaped, as by a busy parent."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as second:
        one, other = node.join(0), node.join(1, launcher=second.pid)
        node.launcher.kill()
        assert not node.ended(1.0)
        save(other, 1)
        second.kill()
        assert node.ended()
        one.close(), other.close()
        end(second)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_to_all_processes_of_a_step_do_not_end_it(node, signum):
    one = node.join()
    os.kill(node.pid, signum)
    save(one, 1)
    assert held(one) == [1]


def test_it_is_small_and_has_no_torch(node):
    one = node.join()
    for iteration in (1, 2, 3):
        save(one, iteration, 64 * MB)
    load(one, 3)
    status = Path(f"/proc/{node.pid}/status").read_text()
    kb = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
    assert kb["RssAnon"] + kb["RssFile"] < 25_000
    assert "torch" not in Path(f"/proc/{node.pid}/maps").read_text()


def test_other_users_are_refused(node):
    if os.geteuid():
        pytest.skip("needs root to be another user")
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); "
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); one.connect('\\0' + sys.argv[1]); "
        "print(len(one.recv(100)))"
    )
    done = subprocess.run([sys.executable, "-c", program, node.name], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.strip() == "0" or "ConnectionReset" in done.stderr


def test_a_keeper_of_another_user_is_not_believed():
    if os.geteuid():
        pytest.skip("needs root to be another user")
    name = f"nvrx-keeper-test-{secrets.token_hex(8)}"
    program = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); "
        "one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); one.bind('\\0' + sys.argv[1]); one.listen(); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout.readline() == b"ready\n"
        with pytest.raises(CheckpointError, match="another user"):
            Link(name, m.Join(0, 1, 1, 1))
        end(stranger)


BOUND_RANK = """
import ctypes, os, sys
from nvrx_slurm.checkpoint import link
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
ctypes.CDLL(None).syscall(238, 2, ctypes.byref(ctypes.c_ulong(1)), 64)  # set_mempolicy(MPOL_BIND, node 0)
print(open("/proc/self/numa_maps").readline().split()[1], flush=True)
link.start(sys.argv[1], os.environ, int(sys.argv[2]), linger_s=0.5)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="has another number of set_mempolicy")
def test_it_is_not_bound_as_the_rank_that_started_it(make):
    other = make()  # whose launcher is used
    name = f"{other.name}-bound"
    argv = [sys.executable, "-c", BOUND_RANK, name, str(other.launcher.pid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
    if done.stdout.strip() != "bind:0":
        pytest.skip("the kernel binds no memory")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.connect("\0" + name)
        pid = struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    assert Path(f"/proc/{pid}/numa_maps").read_text().split()[1] == "default"
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0)
