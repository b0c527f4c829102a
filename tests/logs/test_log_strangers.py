"""An aggregator and peers that break the protocol, hold no token, or send lines that no file system should see."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
from log_harness import JOB, OWNER, TOKEN, stage
from waits import WAIT_S

from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.core.logs.names import cycle_file, index_file
from nvrx_slurm.logs import wire
from nvrx_slurm.logs.merged import missing_lines

pytestmark = pytest.mark.process


HELLO = wire.message(wire.HELLO, {"version": wire.VERSION, "node": "evil"})
MINE = f"{OWNER}/cycle_0/node_9_x/rank_9.out"


@pytest.fixture
def merge(tmp_path):
    """One good shipper has written one line."""
    with stage(tmp_path) as found:
        found.aggregator()
        shipper = found.ships(12)
        found.first_line(b"good\n", b" 0: good\n")
        yield found
        found.write(0, b"still good\n")
        assert shipper.finish() == 0
        assert found.merged().endswith(b" 0: still good\n") and found.programs[0].process.poll() is None


def opened(file, cycle=0):
    return wire.message(wire.OPEN, [wire.Opened(0, cycle, file, 9)])


def chunk(begin, to, source=0):
    return wire.from_chunk(wire.Chunk(source, begin, to, 1, b" 9: evil\n"))


async def ends(where, frames, token=TOKEN):
    """Send these, one after each answer or at once; returns how the stream ended."""
    connection = socket.create_connection(where)
    connection.setblocking(False)
    ended = asyncio.get_running_loop().create_future()
    proved = asyncio.Event()
    secret = identity(token, wire.IDENTITY.format(JOB))
    stream = Stream(connection, secret, False, lambda frame: None, ended.set_result, proved.set)
    await asyncio.wait({ended, asyncio.ensure_future(proved.wait())}, return_when=asyncio.FIRST_COMPLETED)
    for frame in frames:
        stream.send(frame)
    return await asyncio.wait_for(ended, WAIT_S)


BROKEN = [
    [chunk(0, 9)],
    [opened(MINE)],
    [b""],
    [b"\xff junk"],
    [HELLO, HELLO],
    [HELLO, b"\x01not json"],
    [HELLO, wire.message(wire.OPEN, [1])],
    [HELLO, wire.message(wire.OPEN, [["x"]])],
    [HELLO, opened("../../../etc/passwd")],
    [HELLO, opened(f"{OWNER}/../../etc/passwd")],
    [HELLO, opened("4712/r0/cycle_0/node_0_n/rank_0.out")],
    [HELLO, opened(MINE, cycle=-1)],  # no launcher's file was asked for
    [HELLO, opened(MINE), chunk(5, 9)],
    [HELLO, opened(MINE), chunk(0, 9, source=7)],
    [HELLO, opened(MINE), b"\x02short"],
    [wire.message(wire.HELLO, {"version": 99, "node": "n"})],
    [wire.message(wire.HELLO, ["n"])],
]


def test_peers_that_break_the_protocol_are_dropped_and_write_nothing(merge):
    for number, frames in enumerate(BROKEN, 1):
        assert isinstance(asyncio.run(ends(merge.where, frames)), Exception), frames
        merge.write(0, b"%d\n" % number)
        merge.until(lambda line=b" 0: %d\n" % number: merge.merged().endswith(line), "the good one goes on")
    assert b"evil" not in merge.merged()
    assert {path.name for path in Path(merge.prefix).parent.iterdir()} == {"train_cycle0.log", "train_cycle0.log.idx"}


def test_a_stranger_without_the_token_gets_nowhere(merge):
    asyncio.run(ends(merge.where, [HELLO, opened(MINE), chunk(0, 9)], token="guessed"))
    with socket.create_connection(merge.where) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(100) == b""
    assert b"evil" not in merge.merged()


def test_hostile_lines_cost_no_memory_and_break_no_other_line(merge):
    """50 MB without a newline, NULs, bytes that are no text, lines that imitate ours, and an index record."""
    shipper = merge.programs[1]
    size = 50_000_000
    merge.write(0, b"x" * size + b"\n", "err")
    merge.write(0, b" 7: me\n[0,1,1,1]\n\x1b[2J\xff\0\n")
    shipper.tell(now=True)
    merge.until(lambda: merge.index().sources[f"{OWNER}/cycle_0/node_0_n0/rank_0.err"].to == size + 1, "all of it")
    text = merge.merged()
    assert b"\n 0:  7: me\n" in text and b"\n 0: [0,1,1,1]\n" in text and b"\x1b[2J\xef\xbf\xbd<NUL>\n" in text
    assert text.count(b"x") == size and all(line.startswith(b" 0: ") for line in text.splitlines())
    for program in merge.programs:
        status = Path(f"/proc/{program.process.pid}/status").read_text()
        assert int(status.partition("VmHWM:")[2].split()[0]) < 64 * 1024
    assert merge.index().owner == OWNER


def _huge(path):
    Path(path).touch()
    os.truncate(path, 1 << 40)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, _huge])
def test_the_end_of_a_job_waits_for_no_index_of_another_user_and_has_room_for_it(tmp_path, make):
    """Whoever may write beside the merged files can make one of their names first."""
    prefix = str(tmp_path / "app.log")
    Path(cycle_file(prefix, 0)).touch()
    make(index_file(cycle_file(prefix, 0)))
    (tmp_path / "rank_0.out").write_text("one\ntwo\n")
    assert missing_lines(prefix, tmp_path, [{"cycle": 0, "files": [("rank_0.out", 0)]}]) == 2
