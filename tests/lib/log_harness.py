"""The shipper's and the aggregator's real programs, as an agent starts them; ranks are files that the test writes."""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
from waits import WAIT_S

from nvrx_slurm.core.logs.index import Index
from nvrx_slurm.core.logs.names import cycle_file, index_file
from nvrx_slurm.logs import nvrx_logs_pb2 as pb
from nvrx_slurm.logs.nvrx_service import NAME

REPO = Path(__file__).resolve().parents[2]
TOKEN, JOB, OWNER = "logs-token", "logs-job", "4711/r0"


class Program:
    """One program and our end of its control socket. `lines`: the packets that it sent."""

    def __init__(self, module, settings, listener=None, **how):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = f"import sys; from nvrx_slurm.{module} import main; sys.exit(main(sys.argv[1:]))"
        fds = [theirs.fileno(), *((listener.fileno(),) if listener is not None else ())]
        argv = [sys.executable, "-c", command, *map(str, fds)]
        with theirs:
            self.process = subprocess.Popen(argv, **({"cwd": REPO} | how), pass_fds=fds, stderr=subprocess.PIPE)
        self.lines = []
        self.tell(**settings)

    def tell(self, **packet):
        self.control.send(json.dumps(packet).encode())

    def line(self, key, timeout_s=WAIT_S):
        while True:
            assert select.select([self.control], [], [], timeout_s)[0], f"no {key} came: {self.lines}"
            data = self.control.recv(1 << 17)
            assert data, f"it ended: {self.errors()}"
            self.lines.append(json.loads(data))
            if key in self.lines[-1]:
                return self.lines[-1]

    def packet(self, key):
        """The value in the next packet that has this key."""
        return self.line(key)[key]

    @property
    def said(self):
        return [line["say"] for line in self.lines if "say" in line]

    def errors(self):
        self.process.wait(WAIT_S)
        return self.process.stderr.read().decode()

    def finish(self, within_s=WAIT_S):
        self.tell(finish=within_s)
        code = self.process.wait(within_s + WAIT_S)
        assert self.errors() == "", "it printed a traceback"
        return code

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self):
        self.control.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


class Wire:
    """Forwards connections to `to()` until it cuts them, with a reset and in the middle of whatever they carry."""

    def __init__(self, to):
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.where = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._to())
                except OSError:
                    near.close()
                    continue
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(5000):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Reset all connections; how many there were."""
        ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        return len(ends) // 2

    def close(self):
        self._listener.close()
        self.cut()


class Stage:
    """Files of ranks, and programs that merge them."""

    def __init__(self, root):
        self.logs = root / "logs"
        self.prefix = str(root / "out" / "train.log")
        self.programs = []
        self.where = ("127.0.0.1", 0)
        self._listener = None

    def file(self, rank, stream="out", cycle=0, node=0):
        return self.logs / OWNER / f"cycle_{cycle}" / f"node_{node}_n{node}" / f"rank_{rank}.{stream}"

    def write(self, rank, data, stream="out", cycle=0, node=0):
        path = self.file(rank, stream, cycle, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)

    def _start(self, module, settings, listener=None):
        program = Program(module, settings, listener)
        self.programs.append(program)
        return program

    def aggregator(self, term=1, anew=False, **more):
        """In place of the last one, or (`anew`) at another port."""
        settings = {"token": TOKEN, "job": JOB, "term": term, "owner": OWNER, "prefix": self.prefix, "logfile": ""}
        if self._listener is None or anew:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self.where = ("127.0.0.1", int(self._listener.getsockname()[1]))
        return self._start("logs.aggregator", settings | more, self._listener)

    def shipper(self, node=0, **more):
        settings = {"token": TOKEN, "job": JOB, "node": f"n{node}", "log_dir": str(self.logs), "batch_s": 0.01}
        return self._start("logs.shipper", settings | more)

    def at(self, shipper, where=None):
        shipper.tell(at=where or self.where, token=TOKEN)

    def cycle(self, shipper, ranks, world, cycle=0, node=0):
        files = [(str(self.file(r, s, cycle, node).relative_to(self.logs)), r) for r in ranks for s in ("out", "err")]
        shipper.tell(cycle=cycle, files=files, world=world)

    def ships(self, world=1, node=0, ranks=range(1)):
        """A shipper that knows the aggregator and the files of these ranks."""
        shipper = self.shipper(node)
        self.at(shipper)
        self.cycle(shipper, ranks, world, node=node)
        return shipper

    def first_line(self, data, merged):
        """Rank 0 writes it, and it is merged."""
        self.write(0, data)
        self.until(lambda: self.merged() == merged, "written")

    def merged(self, cycle=0):
        path = Path(cycle_file(self.prefix, cycle))
        return path.read_bytes() if path.exists() else b""

    def index(self, cycle=0):
        path = cycle_file(self.prefix, cycle)
        return Index.load(Path(index_file(path)).read_bytes(), os.stat(path).st_size)

    def until(self, condition, what):
        """Look until it is so."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}; {[p.said for p in self.programs]}"
            select.select([], [], [], 0.005)  # a loop without a pause takes a core from what is tested

    def close(self):
        for program in self.programs:
            program.close()


def foreign_client(address, lines):
    """Send (file of the server, text) as a client of NVRx does; returns what the server has taken."""
    chunks = (pb.LogChunk(node_id="n", data=text, file_path=path) for path, text in lines)
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        send = channel.stream_unary(f"/{NAME}/StreamLogs", pb.LogChunk.SerializeToString, pb.StreamResponse.FromString)
        answer = send(chunks, timeout=WAIT_S, wait_for_ready=True)
    assert answer.status == "OK"
    return int(answer.bytes_received)


def by_source(merged, index):
    """What the index says of each source, without the prefixes."""
    files = {}
    found = {}
    at = 0
    for line in index.splitlines():
        record = json.loads(line)
        if isinstance(record, list):
            number, end, _, _ = record
            text = merged[at:end]
            found[files[number]] = found.get(files[number], b"") + b"".join(
                one.partition(b": ")[2] for one in text.splitlines(keepends=True)
            )
            at = end
        elif "file" in record:
            files[record["id"]] = record["file"]
    return found


@contextlib.contextmanager
def stage(root):
    found = Stage(root)
    try:
        yield found
    finally:
        found.close()
