"""The small edges to the kernel: ports, children that cannot outlive us, GPUs that are counted."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.child import processes
from nvrx_slurm.system import gpus
from nvrx_slurm.system.ports import PortReservation

pytestmark = pytest.mark.fast


WAIT_MS = 20_000


def readable(fd, timeout_ms=WAIT_MS):
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


# --- ports ------------------------------------------------------------------------------------------------------------


def test_reserved_port_can_be_listened_on_by_its_user_only():
    reserved = PortReservation()
    hosts = {socket.AF_INET: "127.0.0.1"} | ({socket.AF_INET6: "::1"} if socket.has_ipv6 else {})
    for family, host in hosts.items():
        with socket.socket(family) as careless, pytest.raises(OSError):
            careless.bind((host, reserved.port))  # without SO_REUSEADDR
        with socket.create_server((host, reserved.port), family=family):
            socket.create_connection((host, reserved.port), 5).close()
    reserved.release()


# --- children ---------------------------------------------------------------------------------------------------------


def start(*argv, out):
    with out.open("wb") as file:
        return processes.start(argv, os.environ, file, subprocess.STDOUT)


def test_child_starts_with_no_signal_blocked_or_ignored(tmp_path):
    """As from a shell: Python ignores SIGPIPE for itself, and a launcher blocks the signals that it reads."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        child = start("grep", "^Sig[BI]", "/proc/self/status", out=tmp_path / "out")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert readable(child.pidfd)
    assert child.reap() == 0
    masks = dict(line.split(":\t") for line in (tmp_path / "out").read_text().splitlines())
    assert masks == {"SigBlk": "0" * 16, "SigIgn": "0" * 16}


def test_an_ignored_signal_kills_no_child_that_did_not_ask_for_it(tmp_path):
    """Also one that comes before the child has come to its exec; its own handler still counts."""
    code = "import os, signal, sys; sys.stdin.read(); print(signal.getsignal(10)); signal.raise_signal(10)"
    code += "; print('lives'); signal.signal(10, lambda *_: print('handled')); signal.raise_signal(10)"
    reading, writing = os.pipe()  # it goes on once the signal was sent
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with (tmp_path / "out").open("wb") as file, open(reading) as stdin:
            child = processes.start(
                [sys.executable, "-u", "-c", code], os.environ, file, subprocess.STDOUT, signal.SIGUSR1, stdin
            )
        child.signal_group(signal.SIGUSR1)  # blocked in it, as in us, until it ignores it
        os.close(writing)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert readable(child.pidfd)
    assert child.reap() == 0
    assert (tmp_path / "out").read_text().splitlines() == [str(signal.SIG_IGN), "lives", "handled"]


def test_reaping_kills_what_is_left_of_the_group(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = start("sh", "-c", f"sleep 1000 8>{fifo} & exit 3", out=tmp_path / "out")
    with fifo.open("rb") as reader:  # at its end when nobody has it open for writing any more: the sleeper is gone
        assert readable(child.pidfd)
        assert child.reap() == 3
        assert readable(reader.fileno()) and reader.read() == b""


def test_child_dies_with_its_parent(tmp_path):
    """Also a child that has not come to its exec yet."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = f"""
import os, sys
from nvrx_slurm.child import processes
for _ in range(5):
    processes.start(["sh", "-c", "exec 8>{fifo}; exec sleep 1000"], os.environ, -3, -3)
print("started", flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
        parent.wait()
        assert readable(reader.fileno(), 2000) or reader.read() in (b"", None)
    parent.stdin.close()
    parent.stdout.close()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"8>{fifo}; exec sleep".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                with open(os.pidfd_open(int(pid)), "rb") as left:
                    assert readable(left.fileno(), 1000), f"{pid} outlived its parent"


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "visible, expected",
    [("", 0), ("0", 1), ("0,1,2", 3), ("GPU-a,GPU-b", 2), ("0,-1,2", 1), ("-1", 0), (" 0 , 1 ", 2)],
)
def test_visible_gpus_are_counted_as_cuda_does(visible, expected):
    assert gpus.count({"CUDA_VISIBLE_DEVICES": visible}) == expected
