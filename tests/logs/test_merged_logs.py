"""Shippers and an aggregator as processes: what the ranks wrote is in the merged file exactly once, come what may."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from log_harness import Wire, by_source, stage

from nvrx_slurm.child.program import GIVEN_UP, UNFINISHED
from nvrx_slurm.core.logs.names import cycle_file, index_file
from nvrx_slurm.logs.shipper import Shipper, ShipperSettings

pytestmark = pytest.mark.process


@pytest.fixture
def merge(tmp_path):
    with stage(tmp_path) as found:
        yield found


def test_lines_of_all_ranks_and_streams_are_merged_with_their_ranks(merge):
    merge.aggregator()
    shippers = [merge.ships(12, node, range(6 * node, 6 * node + 6)) for node in range(2)]
    merge.until(lambda: Path(cycle_file(merge.prefix, 0)).exists(), "the file is there before any line")
    merge.write(3, b"one\ntwo\n")
    merge.write(11, b"far\n", "err", node=1)
    merge.until(lambda: merge.merged().count(b"\n") == 3, "three lines")
    merge.write(3, b"no newline")
    for shipper in shippers:
        assert shipper.finish() == 0
    lines = merge.merged().splitlines()
    assert sorted(lines) == [b" 3: no newline", b" 3: one", b" 3: two", b"11: far"]
    assert merge.programs[0].finish() == 0


def test_each_of_many_cycles_has_its_own_file(merge):
    merge.aggregator()
    shipper = merge.shipper()
    merge.at(shipper)
    for cycle in range(12):
        merge.cycle(shipper, range(1), 1, cycle)
        merge.write(0, b"cycle %d" % cycle, cycle=cycle)
        if cycle:
            shipper.tell(over=cycle)
            merge.until(lambda c=cycle: merge.merged(c) == b"0: cycle %d\n" % c, "complete")
    assert merge.merged(0) == b""
    shipper.tell(over=0)  # the aggregator has closed its file meanwhile
    merge.until(lambda: merge.merged(0) == b"0: cycle 0\n", "complete")


def _check_exactly_once(merge, ranks):
    found = by_source(merge.merged(), Path(index_file(cycle_file(merge.prefix, 0))).read_bytes())
    for rank in ranks:
        file = merge.file(rank)
        assert found.get(str(file.relative_to(merge.logs)), b"") == file.read_bytes(), f"rank {rank}"


@pytest.mark.repeats("1")
@pytest.mark.parametrize("seed", range(2))
def test_every_byte_is_merged_once_under_kills_terms_and_cuts(merge, seed):
    """Shippers and aggregators are killed, terms change, connections are reset while four ranks write 4 MB."""
    chance = random.Random(seed)
    ranks, term = range(4), 1
    aggregator = merge.aggregator(term)
    wire = Wire(lambda: merge.where)

    def new_shipper():
        found = merge.shipper()
        merge.at(found, wire.where)
        merge.cycle(found, ranks, 4)
        return found

    def write():
        for rank in ranks:
            lines = [b"%d " % i + b"x" * chance.randrange(300) + b"\n" for i in range(chance.randrange(140))]
            merge.write(rank, b"".join(lines))

    shipper = new_shipper()
    faults = dict.fromkeys(("shipper", "aggregator", "term", "cut"), 0)
    for number in range(60):
        before = len(merge.merged())
        write()
        if number % 5 == 4:
            what = list(faults)[(number // 5) % 4]
            faults[what] += 1
            if what == "cut":
                merge.until(lambda: wire.cut() > 0, "a connection is there and is cut")
            elif what == "shipper":
                shipper.kill()
                shipper = new_shipper()
            elif what == "aggregator":
                aggregator.kill()
                aggregator = merge.aggregator(term)
            elif what == "term":
                old, term = aggregator, term + 1
                old.process.send_signal(signal.SIGSTOP)  # as on a node that was cut off; it wakes up later
                aggregator = merge.aggregator(term, anew=True)
                wire.cut()
                merge.until(lambda b=before: len(merge.merged()) > b, "the new aggregator writes")
                old.process.send_signal(signal.SIGCONT)
        elif number % 3 == 0:
            merge.until(lambda b=before: len(merge.merged()) > b, "progress")
    assert min(faults.values()) >= 3
    codes = [shipper.finish()]
    while codes[-1] == UNFINISHED and len(codes) < 5:  # a busy machine may acknowledge nothing for 5 s
        codes.append(new_shipper().finish())
    assert codes[-1] == 0
    _check_exactly_once(merge, ranks)
    assert aggregator.process.poll() is None and merge.index().term == term
    wire.close()


def test_an_aggregator_of_an_earlier_term_ends_when_it_would_write(merge):
    old = merge.aggregator(1)
    slow = merge.ships(2)
    merge.first_line(b"first\n", b"0: first\n")
    merge.aggregator(2, anew=True)
    merge.ships(2, 1, range(1, 2))
    merge.write(1, b"second\n", node=1)
    merge.until(lambda: merge.merged().count(b"\n") == 2, "the new one writes")
    merge.write(0, b"late\n")  # reaches the old one
    assert old.process.wait(30) == GIVEN_UP
    merge.at(slow)
    merge.until(lambda: merge.merged() == b"0: first\n1: second\n0: late\n", "the late line, once")


def test_a_full_disk_holds_lines_back_and_loses_none(tmp_path):
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        with stage(tmp_path) as merge:
            merge.prefix = str(disk / "train.log")
            ballast = disk / "ballast"
            ballast.write_bytes(b"x" * 200_000)
            aggregator, shipper = merge.aggregator(), merge.ships(2, ranks=range(2))
            for number in range(40):
                for rank in range(2):
                    merge.write(rank, b"%d " % number * 400 + b"\n")
            sentence = aggregator.packet("say")
            assert "train_cycle0.log" in sentence and os.strerror(28) in sentence
            ballast.unlink()
            assert shipper.finish() == 0
            _check_exactly_once(merge, range(2))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_another_job_that_writes_the_file_is_waited_for_and_named(merge):
    merge.aggregator()
    merge.ships()
    merge.first_line(b"ours\n", b"0: ours\n")
    theirs = merge.aggregator(1, owner="4712/r0", anew=True)
    second = merge.shipper(1)
    merge.at(second)
    second.tell(cycle=0, files=[("4712/r0/cycle_0/node_0_n0/rank_0.out", 0)], world=1)
    path = merge.logs / "4712/r0/cycle_0/node_0_n0/rank_0.out"
    assert "4711/r0" in theirs.packet("say") and "%j" in theirs.said[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"theirs\n")
    merge.programs[0].kill()
    merge.until(lambda: merge.merged() == b"0: ours\n0: theirs\n", "it appends when the other job is gone")


def test_ranks_that_write_faster_than_the_aggregator_reads_are_never_stopped(merge):
    """A stopped aggregator stops the shipper; the rank's own file takes everything, and all of it comes later."""
    aggregator, shipper = merge.aggregator(), merge.ships()
    merge.first_line(b"begin\n", b"0: begin\n")
    aggregator.process.send_signal(signal.SIGSTOP)
    writer = threading.Thread(target=lambda: [merge.write(0, (b"y" * 999 + b"\n") * 1000) for _ in range(20)])
    writer.start()
    writer.join(20)
    assert not writer.is_alive()
    status = Path(f"/proc/{shipper.process.pid}/status").read_text()
    assert int(status.partition("VmRSS:")[2].split()[0]) < 48 * 1024
    aggregator.process.send_signal(signal.SIGCONT)
    assert shipper.finish() == 0
    _check_exactly_once(merge, range(1))


def test_a_file_that_cannot_be_written_does_not_hold_up_the_others(merge):
    launchers = Path(merge.prefix).parent / "blocked"
    launchers.parent.mkdir()
    launchers.touch()  # a file where a directory is needed
    aggregator, shipper = merge.aggregator(logfile=str(launchers / "nvrx.log")), merge.shipper()
    merge.at(shipper)
    own = f"{merge.file(0).relative_to(merge.logs).parents[1]}/launcher.log"
    shipper.tell(cycle=-1, files=[(own, -1)], world=0)
    merge.cycle(shipper, range(1), 1)
    merge.write(0, b"goes on\n")
    (merge.logs / own).write_bytes(b"said\n")
    assert "nvrx.log" in aggregator.packet("say")
    merge.until(lambda: merge.merged() == b"0: goes on\n", "the ranks' lines are merged")
    launchers.unlink()
    merge.until(
        lambda: (launchers / "nvrx.log").exists() and (launchers / "nvrx.log").read_bytes() == b"said\n", "later"
    )


def test_an_aggregator_that_cannot_be_reached_is_said(merge):
    shipper = merge.shipper(say_after_s=0.5)
    merge.cycle(shipper, range(1), 1)
    with socket.socket() as closed:  # bound, but nothing listens
        closed.bind(("127.0.0.1", 0))
        merge.at(shipper, closed.getsockname())
        sentence = shipper.packet("say")
        assert f"127.0.0.1:{closed.getsockname()[1]}" in sentence and os.strerror(111) in sentence


def test_a_merged_file_that_is_removed_or_cut_is_made_anew_from_the_ranks_files(merge):
    merge.aggregator()
    merge.ships()
    merge.first_line(b"one\ntwo\n", b"0: one\n0: two\n")
    os.truncate(cycle_file(merge.prefix, 0), 3)
    merge.write(0, b"three\n")
    merge.until(lambda: merge.merged() == b"0: one\n0: two\n0: three\n", "all lines, once")


def test_a_shipper_that_reaches_no_aggregator_tells_that_by_its_code(merge):
    shipper = merge.shipper()
    merge.cycle(shipper, range(2), 2)
    merge.write(1, b"here\n")
    shipper.tell(finish=0.1)
    assert shipper.process.wait(30) == UNFINISHED


def test_a_shipper_that_gets_many_cycles_asks_for_its_files_at_one_pace(tmp_path):
    async def story():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sent = []
        with ours, theirs:
            one = Shipper(ShipperSettings("", "", "n0", str(tmp_path)), theirs)
            one._stream = SimpleNamespace(send=sent.append)
            for cycle in range(9):
                one.on_packet({"cycle": cycle, "files": [(f"{cycle}.out", 0)], "world": 1})
            timers = [timer for timer in one.loop._scheduled if not timer.cancelled()]
            assert len(sent) == 9 and sum(timer._callback == one._open for timer in timers) == 1
            one.loop.remove_reader(theirs)
            one._connecting.cancel()

    asyncio.run(story())


def test_a_shipper_that_waits_to_try_again_tries_at_once_when_the_job_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("nvrx_slurm.logs.shipper._RETRY_S", 1000.0)
    monkeypatch.setattr("nvrx_slurm.logs.wire.LAST_RETRY_S", 1000.0)

    async def story():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            one = Shipper(ShipperSettings("", "", "n0", str(tmp_path)), theirs)
            one.on_packet({"at": listener.getsockname(), "token": "0" * 64})
            (await asyncio.wait_for(loop.sock_accept(listener), 10.0))[0].close()
            one.on_packet({"cycle": 0, "files": [("0.out", 0)], "world": 1})
            one.on_packet({"finish": 1000.0})
            (await asyncio.wait_for(loop.sock_accept(listener), 10.0))[0].close()
            one.loop.remove_reader(theirs)
            one._connecting.cancel()

    asyncio.run(story())
