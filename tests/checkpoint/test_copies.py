"""Two real keepers: copies arrive, are fetched and verified; what does not hold the token gets nowhere. No torch."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waits import WAIT_S

from nvrx_slurm.checkpoint import link
from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint.channel import Channel
from nvrx_slurm.checkpoint.link import CheckpointError, Link
from nvrx_slurm.control.identity import JobIdentity, identity
from nvrx_slurm.records import Kept, MemoryPlan, Wanted

pytestmark = pytest.mark.process

MB = 1 << 20
JOB = identity("a" * 64, "job")
STRANGER = identity("b" * 64, "job")
WORLD = 2


class Node:
    """A keeper, and the test as its agent."""

    def __init__(self, *, limit: int = 0) -> None:
        self.launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.name = f"nvrx-keeper-test-{secrets.token_hex(8)}"
        link.start(self.name, {**os.environ, link.LIMIT: str(limit)}, self.launcher.pid, linger_s=0.1)
        self.agent = link.connect(self.name)
        self.told: list[str] = []
        serving = self.ask(m.Serve("lo", 0))
        assert serving.address == "127.0.0.1" and not serving.why
        self.port = serving.port
        credentials = self.agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int(struct.unpack("iII", credentials)[0])
        self.pidfd = os.pidfd_open(self.pid)

    def ask(self, request: Any) -> Any:
        self.agent.send(m.requests.encode(request))
        return self.hear()

    def hear(self) -> Any:
        while True:
            answer = m.answers.decode(self.agent.recv(m.MAX_PACKET_BYTES))
            if not isinstance(answer, m.Remark):
                return answer
            self.told.append(answer.text)

    def says(self, word: str) -> str:
        """The next sentence; it has this word."""
        if not self.told:
            answer = m.answers.decode(self.agent.recv(m.MAX_PACKET_BYTES))
            assert isinstance(answer, m.Remark)
            self.told.append(answer.text)
        text = self.told.pop(0)
        assert word in text
        return text

    def follow(self, to: Node | None = None, *wanted: Wanted) -> None:
        address = ("", 0) if to is None else ("127.0.0.1", to.port)
        assert isinstance(self.ask(m.Follow(JOB.pem, MemoryPlan(*address, wanted))), m.Accepted)

    def kept(self) -> set[tuple[int, int, int]]:
        found = self.ask(m.AskKept()).kept
        assert all(isinstance(one, Kept) and one.world == WORLD for one in found)
        return {(one.rank, one.cycle, one.iteration) for one in found}

    def gets(self, *expected: tuple[int, int, int]) -> None:
        """Wait until it has these: the other keeper sends in the background."""
        while not set(expected) <= self.kept():
            select.select([self.pidfd], [], [], 0.01)

    def join(self, rank: int, cycle: int = 0) -> Link:
        return Link(self.name, m.Join(rank, WORLD, 1, self.launcher.pid, cycle))

    def wants(self, rank: int, iteration: int, cycle: int = 0) -> Wanted:
        """What another keeper asks this one for."""
        return Wanted(rank, cycle, iteration, "127.0.0.1", self.port)

    def flip(self, iteration: int) -> None:
        """A bit in each state of this iteration."""
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            if "nvrx-checkpoint" in os.readlink(path):
                with path.open("r+b", buffering=0) as memory:
                    if memory.read(1) == bytes([iteration]):
                        memory.seek(1000)
                        memory.write(bytes([iteration ^ 1]))

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.communicate()
        self.agent.close()
        assert select.select([self.pidfd], [], [], WAIT_S)[0]
        os.close(self.pidfd)


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def node(**more: int) -> Node:
        nodes.append(Node(**more))
        return nodes[-1]

    yield node
    for one in nodes:
        one.close()


@pytest.fixture
def pair(make: Callable[..., Node]) -> tuple[Node, Node]:
    """Each sends to the other."""
    one, other = make(), make()
    one.follow(other), other.follow(one)
    return one, other


def save(one: Link, iteration: int, size: int = 3 * MB + 17) -> None:
    _, fd = one.ask(m.AskSpace(iteration, size), m.Space)
    with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
        memory[:size] = bytes([iteration]) * size
    os.close(fd)
    one.ask(m.SaveDone(), m.Accepted)


def load(one: Link, iteration: int, cycle: int = 0) -> bytes:
    saved, fd = one.ask(m.AskSaved((cycle, iteration)), m.Saved)
    with open(fd, "rb") as file:
        return file.read(saved.size)


def test_a_copy_is_the_rank_where_that_moves(pair: tuple[Node, Node]) -> None:
    one, other = pair
    rank = one.join(0)
    for iteration in (1, 2):
        save(rank, iteration)
        other.gets((0, 0, iteration))
    moved = other.join(0, cycle=1)
    assert load(moved, 2) == bytes([2]) * (3 * MB + 17)
    save(moved, 3)
    assert other.kept() == {(0, 0, 2), (0, 1, 3)}


def test_a_node_that_has_nothing_fetches_and_a_load_waits_for_it(make: Callable[..., Node]) -> None:
    has, new = make(), make()
    has.follow(), new.follow()
    rank = has.join(0)
    save(rank, 1), save(rank, 2)
    new.follow(None, has.wants(0, 2), has.wants(0, 1))
    there = new.join(0, cycle=1)
    answer, _ = there.ask(m.AskHeld(), m.HeldSaves)
    assert answer.saves == ((0, 2), (0, 1))
    assert load(there, 2) == bytes([2]) * (3 * MB + 17) and load(there, 1)[:1] == b"\1"
    assert sorted(new.says("was fetched")[:20] for _ in (1, 2)) == ["rank 0: iteration 1 ", "rank 0: iteration 2 "]


def test_damage_here_is_mended_from_the_copy(pair: tuple[Node, Node]) -> None:
    one, other = pair
    rank = one.join(0)
    save(rank, 1), save(rank, 2)
    other.gets((0, 0, 2))
    one.flip(2)
    one.follow(other, other.wants(0, 2))
    assert load(one.join(0, cycle=1), 2) == bytes([2]) * (3 * MB + 17)
    one.says("is damaged here"), one.says("was fetched")


def test_a_damaged_copy_is_not_taken(pair: tuple[Node, Node], make: Callable[..., Node]) -> None:
    one, other = pair
    save(one.join(0), 2)
    other.gets((0, 0, 2))
    other.flip(2)
    new = make()
    new.follow(None, other.wants(0, 2))
    with pytest.raises(CheckpointError, match="not here"):
        load(new.join(0, cycle=1), 2)
    assert "checksum" in new.says("cannot be fetched")
    assert new.kept() == set()


def test_what_a_training_that_was_given_up_has_sent_is_outdated(pair: tuple[Node, Node]) -> None:
    one, other = pair
    rank = one.join(0)
    save(rank, 1)
    other.gets((0, 0, 1))
    save(rank, 2)
    other.gets((0, 0, 2))
    again = one.join(0, cycle=1)
    save(again, 1)
    other.gets((0, 1, 1))
    assert other.kept() == {(0, 1, 1)}


def test_copies_of_a_node_that_sends_elsewhere_now_are_forgotten(
    pair: tuple[Node, Node], make: Callable[..., Node]
) -> None:
    one, other = pair
    save(one.join(0), 1)
    other.gets((0, 0, 1))
    third = make()
    third.follow(other)
    save(third.join(1, cycle=1), 2)
    other.gets((1, 1, 2))
    assert other.kept() == {(1, 1, 2)}


def test_what_comes_late_from_an_earlier_cycle_is_not_taken(pair: tuple[Node, Node]) -> None:
    """The keeper of an agent that was killed goes on for a while."""
    one, other = pair
    save(one.join(0, cycle=1), 4)
    other.gets((0, 1, 4))
    with call(other) as channel:
        channel.tell(OFFER)
        assert isinstance(channel.hear(), m.NotKept)
    assert other.kept() == {(0, 1, 4)}


def test_a_partner_without_room_is_said_once_and_training_goes_on(make: Callable[..., Node]) -> None:
    one, small = make(), make(limit=MB)
    small.follow(), one.follow(small)
    rank = one.join(0)
    for iteration in (1, 2, 3):
        save(rank, iteration)
    one.says("--ft-checkpoint-memory")
    assert small.kept() == set() and one.kept() == {(0, 0, 2), (0, 0, 3)}
    assert not any("no copy" in text for text in one.told)


def test_a_partner_that_is_gone_is_said(make: Callable[..., Node]) -> None:
    one = make()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    one.ask(m.Follow(JOB.pem, MemoryPlan("127.0.0.1", port)))
    save(one.join(0), 1)
    one.says("no copy of rank 0")


def test_an_unknown_interface_is_said(make: Callable[..., Node]) -> None:
    answer = make().ask(m.Serve("nvrx9", 0))
    assert answer.port == 0 and "--ft-checkpoint-interface nvrx9" in answer.why


OFFER = m.Offer(0, WORLD, 0, 5, 64, 0, "me")
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "random": secrets.token_bytes(3000),
    "a-message-without-tls": struct.pack("!I", 3) + b"abc",
    "http": b"GET / HTTP/1.0\r\n\r\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_bytes_of_strangers_change_nothing(pair: tuple[Node, Node], data: bytes) -> None:
    one, other = pair
    callers = [socket.create_connection(("127.0.0.1", other.port), WAIT_S) for _ in range(20)]
    for caller in callers:  # each is hung up on, at once or after the time for a proof
        with suppress(OSError), caller:
            caller.sendall(data)
            if data:
                caller.shutdown(socket.SHUT_WR)
            while caller.recv(4096):
                pass
    save(one.join(0), 1)
    other.gets((0, 0, 1))


def test_the_17th_caller_at_once_is_hung_up_on(pair: tuple[Node, Node]) -> None:
    """The others have a while for their proof."""
    callers = [socket.create_connection(("127.0.0.1", pair[1].port), WAIT_S) for _ in range(17)]
    ended, _, _ = select.select(callers, [], [], WAIT_S)
    assert ended == callers[16:] and callers[16].recv(1) == b""
    for caller in callers:
        caller.close()


def call(node: Node, identity: JobIdentity = JOB) -> Channel:
    return Channel(socket.create_connection(("127.0.0.1", node.port), WAIT_S), identity, is_server=False)


def test_who_has_another_token_gets_nowhere(pair: tuple[Node, Node]) -> None:
    _, other = pair
    with pytest.raises(OSError), call(other, STRANGER) as channel:
        channel.tell(OFFER)
        channel.hear()
    assert other.kept() == set()


WRONG: dict[str, bytes] = {
    "too-long": struct.pack("!I", 1 << 31),
    "no-message": struct.pack("!I", 5) + b"hello",
    "of-the-agent": struct.pack("!I", len(m.requests.encode(m.AskKept()))) + m.requests.encode(m.AskKept()),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_a_member_that_sends_nonsense_is_hung_up_on(pair: tuple[Node, Node], data: bytes) -> None:
    _, other = pair
    with call(other) as channel:
        channel.write(data)
        with pytest.raises(OSError, match="closed|EOF|reset"):
            channel.hear()
    assert other.kept() == set()


@pytest.mark.parametrize("change", [{"size": 0}, {"rank": -1}], ids=str)
def test_an_offer_that_makes_no_sense_is_refused(pair: tuple[Node, Node], change: dict[str, int]) -> None:
    _, other = pair
    fields = {name: getattr(OFFER, name) for name in OFFER.__struct_fields__}
    with call(other) as channel:
        channel.tell(m.Offer(**{**fields, **change}))
        assert isinstance(channel.hear(), m.NotKept)
    assert other.kept() == set()


@pytest.mark.parametrize("sent", [0, 30, 64])
def test_a_state_that_comes_in_part_or_damaged_is_not_kept(pair: tuple[Node, Node], sent: int) -> None:
    _, other = pair
    with call(other) as channel:
        channel.tell(OFFER)
        assert isinstance(channel.hear(), m.Space)
        channel.write(bytes(sent))
        if sent == OFFER.size:
            assert "checksum" in channel.hear().why
    assert other.kept() == set()


def test_a_node_of_many_ranks_is_fetched_whole(make: Callable[..., Node]) -> None:
    """More states than a keeper takes calls at once."""
    has, new = make(), make()
    has.follow(), new.follow()
    for rank in range(12):
        one = has.join(rank)
        save(one, 1), save(one, 2)
        one.close()
    expected = {(rank, 0, iteration) for rank in range(12) for iteration in (1, 2)}
    assert has.kept() == expected
    new.follow(None, *(has.wants(rank, iteration) for iteration in (2, 1) for rank in range(12)))
    new.gets(*expected)


def test_it_is_small_with_copies_too(pair: tuple[Node, Node]) -> None:
    one, other = pair
    links = [one.join(rank) for rank in range(4)]
    for iteration in (1, 2, 3):
        for rank in links:
            save(rank, iteration, 16 * MB)
        other.gets(*((rank, 0, iteration) for rank in range(4)))
    for node in pair:
        status = Path(f"/proc/{node.pid}/status").read_text()
        kb = {line.split(":")[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith("Rss")}
        print(kb)
        assert kb["RssAnon"] + kb["RssFile"] < 25_000


def test_saves_that_are_faster_than_copies_cost_copies_only(pair: tuple[Node, Node]) -> None:
    """The partner is stopped, and goes on: the newest one arrives, and what was sent is not torn."""
    one, other = pair
    rank = one.join(0)
    os.kill(other.pid, signal.SIGSTOP)
    for iteration in range(1, 8):
        save(rank, iteration, 8 * MB)
    os.kill(other.pid, signal.SIGCONT)
    other.gets((0, 0, 7))
    one.says("longer than saves")
    assert one.told == []
    assert load(other.join(0, cycle=1), 7)[:1] == b"\7"


def test_a_keeper_that_is_killed_while_it_sends_leaves_nothing_half(make: Callable[..., Node]) -> None:
    one, other = make(), make()
    one.follow(other), other.follow()
    rank = one.join(0)
    save(rank, 1)
    other.gets((0, 0, 1))
    os.kill(other.pid, signal.SIGSTOP)
    save(rank, 2, 64 * MB)  # more than the buffers of the connection
    os.kill(one.pid, signal.SIGKILL)
    os.kill(other.pid, signal.SIGCONT)
    assert select.select([one.pidfd], [], [], WAIT_S)[0]
    again = other.join(0, cycle=1)
    assert {save for save in again.ask(m.AskHeld(), m.HeldSaves)[0].saves} <= {(0, 1)}
    save(again, 2)
    assert load(again, 2, cycle=1)[:1] == b"\2"
