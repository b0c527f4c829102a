"""Merged logs: what an aggregator takes from 1,000 shippers, how late lines are, what a shipper costs."""

import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks import procfs
from benchmarks.figures import Figure, repeated
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.logs import wire

_TOKEN, _JOB, _OWNER = "bench", "bench", "1/r0"
_STREAMS, _CHUNK_LINES, _LINE_BYTES, _TOTAL_BYTES = 1_000, 400, 150, 1 << 30
_LATENCY_S, _LATENCY_BYTES_S, _RANKS = 10.0, 12e6, 8
_LINES_S, _WINDOW_S, _SETTLE_S = 800, 20.0, 2.0


@contextmanager
def _program(module, settings, listener=None):
    """(process, our end of its control socket)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [theirs.fileno(), *((listener.fileno(),) if listener is not None else ())]
    code = f"import sys; from nvrx_slurm.logs.{module} import main; sys.exit(main(sys.argv[1:]))"
    root = Path(__file__).resolve().parents[1]
    with subprocess.Popen([sys.executable, "-c", code, *map(str, fds)], cwd=root, pass_fds=fds) as process:
        theirs.close()
        ours.send(json.dumps(settings).encode())
        try:
            yield process, ours
        finally:
            process.kill()
            ours.close()


@contextmanager
def _pair(shipper):
    """A directory, the pids of an aggregator and a shipper (0: none), and what tells the shipper something."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        base = {"token": _TOKEN, "job": _JOB}
        told = base | {"term": 1, "owner": _OWNER, "prefix": f"{root}/train.log", "logfile": ""}
        aggregator, _ = stack.enter_context(_program("aggregator", told, listener))
        where = listener.getsockname()
        if not shipper:
            yield root, aggregator.pid, where[1], lambda **packet: None
            return
        process, control = stack.enter_context(_program("shipper", base | {"node": "n", "log_dir": str(root)}))
        (root / _OWNER / "cycle_0" / "node_0_n").mkdir(parents=True)  # as the agent does
        files = [(f"{_OWNER}/cycle_0/node_0_n/rank_{rank}.{s}", rank) for rank in range(_RANKS) for s in ("out", "err")]
        for packet in ({"cycle": 0, "files": files, "world": _RANKS}, {"at": where, "token": _TOKEN}):
            control.send(json.dumps(packet).encode())
        while not (root / "train_cycle0.log").exists():
            time.sleep(0.01)
        yield root, aggregator.pid, process.pid, lambda **packet: control.send(json.dumps(packet).encode())


async def _load(port):
    """1,000 streams send the same lines as fast as they are acknowledged."""
    text = b"".join(b"%4d: " % (i % _STREAMS) + b"x" * (_LINE_BYTES - 7) + b"\n" for i in range(_CHUNK_LINES))
    each = _TOTAL_BYTES // len(text) // _STREAMS
    ids, loop = identity(_TOKEN, wire.IDENTITY.format(_JOB)), asyncio.get_running_loop()
    done = [loop.create_future() for _ in range(_STREAMS)]
    streams = []

    def send(number, at):
        chunk = wire.Chunk(0, at * len(text), (at + 1) * len(text), 1, text)
        streams[number].send(wire.from_chunk(chunk))

    def on_frame(number, frame):
        at = wire.content(frame)["0"] // len(text)
        if at < each:
            send(number, at)
        elif not done[number].done():
            done[number].set_result(None)

    def on_proved(number):
        streams[number].send(wire.message(wire.HELLO, {"version": wire.VERSION, "node": f"n{number}"}))
        file = f"{_OWNER}/cycle_0/node_{number}/rank_{number}.out"
        sources = [wire.Opened(0, 0, file, number)]
        streams[number].send(wire.message(wire.OPEN, sources))

    for number in range(_STREAMS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setblocking(False)
        ends = partial(lambda one, why: one.done() or one.set_exception(why), done[number])
        proved = partial(lambda n: loop.call_soon(on_proved, n), number)
        streams.append(Stream(connection, ids, False, partial(on_frame, number), ends, proved))
    await asyncio.gather(*done)
    for stream in streams:
        stream.finish(0.1)


def _throughput():
    """Processor time of the aggregator: it may use one core, and the generator needs the other one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with _pair(shipper=False) as (root, aggregator, port, _):
        asyncio.run(_load(port))
        size = (root / "train_cycle0.log").stat().st_size
        return procfs.cpu_s(aggregator) / size * 1e9


def _latency():
    """Each line holds the time at which it was written; the merged file is looked at every 10 ms."""
    late = []
    with _pair(shipper=True) as (root, *_), ExitStack() as stack, (root / "train_cycle0.log").open("rb") as merged:
        ranks = _ranks(root, stack)
        begin_s, written = time.monotonic(), 0.0
        while (now_s := time.monotonic()) < begin_s + _LATENCY_S:
            while written < (now_s - begin_s) * _LATENCY_BYTES_S:
                written += sum(rank.write(_stamped()) for rank in ranks)
            lines = [line.split(b" ") for line in merged.read().splitlines()[::100]]
            late += [time.monotonic() - float(words[1]) for words in lines if len(words) == 3]
            time.sleep(0.01)
    return sorted(late)[int(0.99 * len(late))]


def _ranks(root, stack):
    """Return the files that the ranks write."""
    folder = root / _OWNER / "cycle_0" / "node_0_n"
    return [stack.enter_context((folder / f"rank_{n}.out").open("ab", buffering=0)) for n in range(_RANKS)]


def _stamped():
    return (b"%.6f " % time.monotonic()).ljust(_LINE_BYTES - 1, b"x") + b"\n"


def _shipper(value, lines_s):
    """`value(pid, window)` before and after a window in which 8 ranks write `lines_s` lines per second."""

    def measure(launchers, repeats):
        samples = []
        with _pair(shipper=True) as (root, _, shipper, _), ExitStack() as stack:
            ranks = _ranks(root, stack)
            _write(ranks, lines_s, _SETTLE_S)
            for _ in range(repeats):
                before = value(shipper, _WINDOW_S)
                _write(ranks, lines_s, _WINDOW_S)
                samples.append(value(shipper, _WINDOW_S) - before)
        return {"nvrx-run": samples}

    return measure


def _write(ranks, lines_s, seconds):
    begin_s, line = time.monotonic(), b"x" * (_LINE_BYTES - 1) + b"\n"
    for number in range(int(seconds * lines_s)):
        ranks[number % len(ranks)].write(line)
        time.sleep(max(0.0, begin_s + number / lines_s - time.monotonic()))
    time.sleep(max(0.0, begin_s + seconds - time.monotonic()))


def _memory():
    """Resident, after 100 MB went through it."""
    with _pair(shipper=True) as (root, _, shipper, tell):
        lines = 1_000_000
        (root / _OWNER / "cycle_0" / "node_0_n" / "rank_0.out").write_bytes((b"y" * 99 + b"\n") * lines)
        tell(over=0)
        while (root / "train_cycle0.log").stat().st_size < 100 * lines:
            time.sleep(0.01)
        status = Path(f"/proc/{shipper}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _cpu(pid, window_s):
    return procfs.cpu_s(pid) / window_s * 100


def _switches(pid, window_s):
    return procfs.switches({pid}) / window_s


FIGURES = [
    Figure("logs-aggregator", "aggregator, 1,000 shippers, 1 GB: CPU time", "s/GB", 10.0, repeated(_throughput)),
    Figure("logs-latency", "line in the merged file, 12 MB/s, p99", "s", 2.0, repeated(_latency)),
    Figure("logs-shipper", "shipper, 800 lines/s", "% CPU", 1.0, _shipper(_cpu, _LINES_S)),
    Figure("logs-wakeups", "idle wake-ups of a shipper", "/s", 2.0, _shipper(_switches, 0)),
    Figure("logs-memory", "shipper, peak resident memory", "MB", 40.0, repeated(_memory)),
]
