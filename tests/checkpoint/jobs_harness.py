"""Jobs of real `nvrx-run`, gloo and keepers, in which a fault comes when all ranks wait for it in C.

TRAINING FAULT FAULT_AT STEPS is what they do; the state begins with its iteration and its rank.
"""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from stage import free_port

from nvrx_slurm.checkpoint import link
from nvrx_slurm.checkpoint import messages as m

REPO = Path(__file__).resolve().parents[2]
BOUND_S = 180.0  # torch is imported by ten processes at once
STEPS = 6
FAULT_AT = 4
FLAGS = (
    *("--max-restarts=3", "--ft-checkpoint-interface=lo", "--rdzv-id=copies"),
    *("--ft-keepalive-interval=2", "--ft-keepalive-timeout=2"),
)
LAST_CALL = "--rdzv-conf=join_timeout=60,last_call_timeout=30"

TRAINING = """
import ctypes, hashlib, os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
import torch.distributed as dist
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import link, rank as keeping

keeping.start = partial(link.start, linger_s=2.0)
fault, fault_at, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["NVRX_CYCLE"])
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
ballast = {"slow": 12 << 20, "in-a-send": rank // 3 * 8 << 20}.get(fault, 0)  # of 8 bytes

def state(iteration):
    which = torch.full((2 + ballast,), iteration)
    which[1] = rank
    return {"which": which, "model": model.state_dict(), "optimizer": optimizer.state_dict()}

def die(*_):
    print("dies", rank, cycle, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def eat(*_):
    Path(sys.argv[4], "cgroup.procs").write_text(str(os.getpid()))
    print("eats", rank, cycle, flush=True)
    eaten = [bytes([1]) * (1 << 20) for _ in range(1000)]
    raise AssertionError("the limit allows it")

if fault == "in-a-load" and rank == 3 and cycle == 1:
    keeping.tree.Fitting.fill = die
found = checkpoint.load(state(0))
if found is not None:
    optimizer.load_state_dict(found[0]["optimizer"])
begin = 0 if found is None else found[1]
print("begins", cycle, rank, begin, flush=True)
for step in range(begin, steps):
    if cycle < (2 if fault == "told" else 1) and step == fault_at + cycle and fault != "none":
        if fault == "hang":
            from nvrx_slurm.fault_tolerance import RankMonitorClient
            client = RankMonitorClient()
            client.init_workload_monitoring()
            client.send_heartbeat()
        print("fault", rank, os.getppid(), os.getpid(), link.address(os.environ, 0), cycle, flush=True)
        dist.barrier()
        if rank == 1 and fault in ("in-a-save", "out-of-memory"):
            keeping.tree.Mapped.views = die if fault == "in-a-save" else eat
            checkpoint.save(state(step + 1), step + 1)
        if rank == 1 and fault == "killed":
            die()
        if fault in ("in-a-save", "out-of-memory"):
            checkpoint.save(state(step + 1), step + 1)  # this rank is one step further than the other
        while True:  # no Python code runs any more, as in a collective: no handler of a signal
            ctypes.CDLL(None).pause()
    torch.manual_seed(100 * rank + step)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)
    optimizer.step()
    while fault in ("slow-saves", "in-a-send") and cycle == 0 and not Path(f"save{step + 1}").exists():
        time.sleep(0.01)
    assert checkpoint.save(state(step + 1), step + 1)
text = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print("weights", rank, hashlib.sha256(text).hexdigest(), flush=True)
dist.destroy_process_group()
"""


def launch(directory, words, *more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NVRX_", "PET_", "TORCHELASTIC_"))}
    env = kept | {"PYTHONPATH": str(REPO), "TMPDIR": str(directory)}
    flags = (f"--log-dir={directory / 'logs'}", "--nproc-per-node=2", "--max-restarts=1", *more)
    return subprocess.Popen(
        [sys.executable, "-m", "nvrx_slurm.cli.run", *flags, *words],
        env=env, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def keepers(launcher):
    """Those of the ranks of a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"nvrx-keeper-") for word in words) and str(launcher).encode() in words:
            found.append(int(path.parent.name))
    return found


def begins(text, cycle):
    return {int(one) for one in re.findall(rf"begins {cycle} \d (\d+)", text)}


def kept(keeper):
    """Rank and iteration of all that a keeper has."""
    try:
        words = Path(f"/proc/{keeper}/cmdline").read_bytes().decode().split("\0")
    except OSError:  # it was the parent of the keeper, that ends when the keeper listens
        return []
    names = [word for word in words if word.startswith("nvrx-keeper-")]
    if not names:  # a zombie has no command line
        return []
    try:
        with link.connect(names[0]) as connection:
            connection.send(m.requests.encode(m.AskKept()))
            answer = m.answers.decode(connection.recv(m.MAX_PACKET_BYTES))
    except link.KeeperGone:  # it does not listen yet
        return []
    return [(one.rank, one.iteration) for one in answer.kept]


def memory(keeper):
    """The files of all states that a keeper has."""
    for path in Path(f"/proc/{keeper}/fd").iterdir():
        try:
            if "nvrx-checkpoint" in os.readlink(path):
                with path.open("r+b", buffering=0) as file:
                    yield file
        except FileNotFoundError:  # it was closed meanwhile
            continue


class Node:
    """One agent, and what it prints."""

    def __init__(self, process):
        self.process = process
        self.text = ""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.text += line

    @property
    def waits(self):
        """Pid and keeper of each rank that waits for its fault."""
        return self.waits_in(0)

    def waits_in(self, cycle):
        found = re.findall(rf"fault \d+ \d+ (\d+) (\S+) {cycle}$", self.text, re.M)
        return [(int(pid), name) for pid, name in found]

    @property
    def keeper(self):
        """Its pid."""
        (pid,) = keepers(self.process.pid)
        return pid

    def has(self, iteration):
        """Whether it has the states of its own ranks, and two copies."""
        found = [one for pid in keepers(self.process.pid) for one in kept(pid)]
        return [kept for _, kept in found].count(iteration) == 4

    def kill(self):
        """Agent and keeper: nothing of the node is left."""
        pid = self.keeper
        self.process.kill()
        os.kill(pid, signal.SIGKILL)

    def kill_keeper(self):
        os.kill(self.keeper, signal.SIGKILL)

    def kill_rank(self):
        os.kill(self.waits[1][0], signal.SIGKILL)

    def flip(self, ranks=range(4), iterations=range(STEPS)):
        """A bit in each state of these; returns how many."""
        count = 0
        for file in memory(self.keeper):
            iteration, rank = (int.from_bytes(file.read(8), "little") for _ in range(2))
            if rank in ranks and iteration in iterations:
                file.seek(8)
                file.write(bytes([rank ^ 1]))
                count += 1
        return count


class Job:
    """`active` nodes of two ranks, and spares."""

    def __init__(self, directory, fault, active=2, spares=1, words=(), flags=()):
        self.directory = directory
        (directory / "train.py").write_text(TRAINING)
        where = (f"--nnodes={active}:{active + spares}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", LAST_CALL)
        argv = [str(directory / "train.py"), fault, str(FAULT_AT), str(STEPS), *words]
        self.nodes = []
        for rank in range(active + spares):
            self.nodes.append(Node(launch(directory, argv, *FLAGS, *where, f"--node-rank={rank}", *flags)))
        self.active = self.nodes[:active]

    def save(self, iteration):
        """One of "slow-saves": each keeper has the copies of it when this returns."""
        (self.directory / f"save{iteration}").touch()
        self.until(lambda: all(one.has(iteration) for one in self.active))

    def reach_the_fault(self, cycle=0):
        """All ranks wait, and each keeper has the copies of the last iteration."""
        active = []

        def all_wait():
            active[:] = [one for one in self.nodes if len(one.waits_in(cycle)) == 2]
            return len(active) == len(self.active)

        self.until(all_wait)
        self.until(lambda: all(one.has(FAULT_AT + cycle) for one in active))

    def until(self, condition, pause_s=0.05):
        deadline_s = time.monotonic() + BOUND_S
        while not condition():
            assert time.monotonic() < deadline_s, self.text
            select.select([], [], [], pause_s)

    def end(self, *lost):
        """The weights, when all others have ended well; nothing of theirs is left."""
        self.until(lambda: all(one.process.poll() is not None for one in self.nodes))
        for one in self.nodes:
            one.reader.join()
        rest = [one for one in self.nodes if one not in lost]
        assert [one.process.returncode for one in rest] == [0] * len(rest), self.text
        assert [keepers(one.process.pid) for one in rest] == [[]] * len(rest)
        return set(re.findall(r"weights \d (\w+)", self.text))

    @property
    def text(self):
        return "".join(one.text for one in self.nodes)

    def close(self):
        for one in self.nodes:
            one.process.kill()
            one.process.wait()
            for pid in keepers(one.process.pid):  # of an agent that was killed: it would linger
                os.kill(pid, signal.SIGKILL)
            one.reader.join()
            print(one.text)
