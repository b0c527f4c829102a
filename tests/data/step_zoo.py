"""A script that imports nothing of ours, trains, and then pauses or hangs: `step_zoo.py KIND RANK`.

A pause ends when the test has seen what the launcher says of it. A hang ends with its process. KIND/ddp trains in DDP.
"""

import asyncio
import ctypes
import fcntl
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import torch
import torch.distributed as dist

HERE = Path(os.environ["NVRX_TEST_GATES"])
ENDED, MADE = HERE / "told", HERE / "made"
EVERY_S = 0.1
BLOCK = bytes(1 << 20)
SHELL_LOOP = f"while [ ! -e {ENDED} ]; do :; done"
SHELL_LINES = f"while sleep {EVERY_S}; do echo evaluated; done"
PYTHON_LOOP = f"import os\nwhile not os.path.exists({str(ENDED)!r}): pass"
FORK = multiprocessing.get_context("fork")


def repeat(act, every_s=0.0):
    while not os.access(ENDED, os.F_OK):  # tells by its result: faulthandler's handler does not keep errno
        act()
        if every_s:
            time.sleep(every_s)


def idle():
    time.sleep(600.0)


compute = partial(repeat, int)
compress = partial(zlib.compress, BLOCK)


def load(act):
    """One batch, made by `act`."""
    flags = {"num_workers": 1, "multiprocessing_context": "fork"}
    list(torch.utils.data.DataLoader([0], collate_fn=lambda items: act(), **flags))


def read():
    Path(__file__).read_bytes()


def write():
    with open(MADE, "wb") as file:
        file.write(BLOCK)
        os.fsync(file.fileno())


def join(one):
    one.start()
    one.join()


def in_a_pool():
    with FORK.Pool(2) as pool:
        pool.apply(compute)


def submit(pool, act):
    with pool:
        pool.submit(act).result()


def peer(serve):
    """The address of a process that serves one connection, until that is closed."""
    listener = socket.create_server(("127.0.0.1", 0))
    FORK.Process(target=lambda: serve(listener.accept()[0]), daemon=True).start()
    return listener.getsockname()


def sends(connection):
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        connection.sendall(bytes(1 << 16))
        time.sleep(EVERY_S)


def takes(connection):
    while connection.recv(1 << 16):
        time.sleep(EVERY_S)


def connect(serve):
    return socket.create_connection(peer(serve))


COMPUTES = {
    "evaluates": partial(torch.mm, torch.ones(99, 99), torch.ones(99, 99)),
    "compresses": compress,
    "counts": compute,
    "in_a_thread": lambda: submit(ThreadPoolExecutor(1), partial(repeat, compress)),
    "forks": lambda: join(FORK.Process(target=compute)),
    "in_a_pool": in_a_pool,
    "in_an_executor": lambda: submit(ProcessPoolExecutor(1, FORK), compute),
    "compiles": lambda: subprocess.check_call(["sh", "-c", SHELL_LOOP]),
    "starts_python": lambda: subprocess.check_call([sys.executable, "-c", PYTHON_LOOP]),
    "loads_and_computes": lambda: load(compute),
}
# As slowly as a loaded file system, or a peer that is far.
MOVES = {
    "loads_and_reads": lambda: load(lambda: repeat(read, EVERY_S)),
    "reads": read,
    "writes": write,
    "saves": lambda: torch.save(torch.zeros(999), MADE),
    "copies": lambda: shutil.copy(__file__, MADE),
    "prints": lambda: print("evaluated one more", flush=True),
    "reads_a_pipe": lambda: repeat(subprocess.Popen(["sh", "-c", SHELL_LINES], stdout=subprocess.PIPE).stdout.readline),
    "downloads": lambda: repeat(partial(connect(sends).recv, 1 << 16)),
    "downloads_by_http": lambda: repeat(partial(urlopen("http://{}:{}".format(*peer(sends))).read, 1 << 16)),
    "uploads": lambda: repeat(partial(connect(takes).sendall, bytes(1 << 16))),
}


def locks_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_lock_of_another():
    with open(HERE / "lock", "wb") as file, open(HERE / "lock") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        FORK.Process(target=idle).start()  # it holds the lock, too
        file.close()
        fcntl.flock(again, fcntl.LOCK_EX)


def opens_a_fifo():
    os.mkfifo(HERE / "fifo")
    os.open(HERE / "fifo", os.O_RDONLY)


def hears_nothing():
    near, _far = socket.socketpair()
    near.recv(1)


HANGS = {
    "sleeps": idle,
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "in_c": lambda: ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64)),
    "locks_twice": locks_twice,
    "of_a_queue": lambda: queue.Queue().get(),
    "of_a_queue_of_processes": lambda: FORK.Queue().get(),
    "of_a_semaphore": lambda: FORK.Semaphore(0).acquire(),
    "hears_nothing": hears_nothing,
    "reads_an_empty_pipe": lambda: os.read(os.pipe()[0], 1),
    "opens_a_fifo": opens_a_fifo,
    "waits_for_a_child": lambda: subprocess.check_call(["sleep", "600"]),
    "waits_for_a_loader": lambda: load(idle),
    "waits_for_a_lock_of_another": waits_for_a_lock_of_another,
    "joins_a_thread": lambda: join(threading.Thread(target=idle, daemon=True)),
    "waits_for_a_signal": lambda: signal.sigwait({signal.SIGUSR1}),
    "of_an_event_loop": lambda: asyncio.new_event_loop().run_forever(),
    "asks_the_store": lambda: dist.distributed_c10d._get_default_store().get("nobody sets this"),
    "leaves_out_a_collective": dist.barrier,
}


def main():
    kind, _, ddp = sys.argv[1].partition("/")
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if ddp:
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def train(steps):
        for _ in range(steps):
            net(torch.ones(2, 4)).sum().backward()
            for one in () if ddp else net.parameters():
                dist.all_reduce(one.grad)
            optimizer.step()

    train(25)
    if os.environ["NVRX_CYCLE"] == "0" and dist.get_rank() == int(sys.argv[2]):
        repeat((COMPUTES | MOVES | HANGS)[kind], EVERY_S * (kind in MOVES))
    train(5)
    dist.barrier()
    os._exit(0)


main()
