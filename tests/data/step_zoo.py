"""A script that imports nothing of ours, trains, and then pauses or hangs: `step_zoo.py KIND RANK [ddp]`.

A pause ends when the test has seen what the launcher says of it. A hang ends with its process.
"""

import fcntl
import hashlib
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
import urllib.request
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(os.environ["NVRX_TEST_GATES"])
ENDED = HERE / "told"
EVERY_S = 0.1
SHELL_LOOP = f"while [ ! -e {ENDED} ]; do :; done"
PYTHON_LOOP = f"import os\nwhile not os.path.exists({str(ENDED)!r}): pass"
FORK = multiprocessing.get_context("fork")


def told():
    return os.access(ENDED, os.F_OK)  # tells by its result: faulthandler's handler does not keep errno


def busy(act):
    while not told():
        act()


def compute():
    busy(lambda: None)


def each(act):
    """As slowly as a loaded file system."""
    while not told():
        act()
        time.sleep(EVERY_S)


class Items(torch.utils.data.Dataset):
    """One item, made by `act`."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.act()
        return torch.zeros(1)


def load(act):
    list(torch.utils.data.DataLoader(Items(act), num_workers=1, multiprocessing_context="fork"))


def read():
    Path(__file__).read_bytes()


def write():
    with open(HERE / f"written-{os.getpid()}", "wb") as file:
        file.write(bytes(1 << 16))
        os.fsync(file.fileno())


def far(serve):
    """The address of a process that serves one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def begin():
        connection, _ = listener.accept()
        serve(connection)

    FORK.Process(target=begin, daemon=True).start()
    return listener.getsockname()


def sends(connection):
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:  # until its reader has gone
        connection.sendall(bytes(1 << 16))
        time.sleep(EVERY_S)


def takes(connection):
    while connection.recv(1 << 16):
        time.sleep(EVERY_S)


def downloads():
    with socket.create_connection(far(sends)) as connection:
        busy(lambda: connection.recv(1 << 16))


def downloads_by_http():
    host, port = far(sends)
    with urllib.request.urlopen(f"http://{host}:{port}") as answer:
        busy(lambda: answer.read(1 << 16))


def uploads():
    with socket.create_connection(far(takes)) as connection:
        while not told():
            connection.sendall(bytes(1 << 16))


def reads_a_pipe():
    with subprocess.Popen([sys.executable, "-uc", f"import time\nwhile True: print('x'); time.sleep({EVERY_S})"],
                          stdout=subprocess.PIPE) as child:  # fmt: skip
        while not told():
            child.stdout.readline()
        child.kill()


def forks():
    one = FORK.Process(target=compute)
    one.start()
    one.join()


def in_a_pool():
    with FORK.Pool(2) as pool:
        pool.apply(compute)


def in_an_executor():
    with ProcessPoolExecutor(1, FORK) as pool:
        pool.submit(compute).result()


def in_a_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(busy, lambda: hashlib.sha256(bytes(1 << 20))).result()


PAUSES = {
    "evaluates": lambda: busy(lambda: torch.mm(torch.ones(99, 99), torch.ones(99, 99))),
    "compresses": lambda: busy(lambda: zlib.compress(bytes(1 << 20))),
    "counts": compute,
    "in_a_thread": in_a_thread,
    "forks": forks,
    "in_a_pool": in_a_pool,
    "in_an_executor": in_an_executor,
    "compiles": lambda: subprocess.run(["sh", "-c", SHELL_LOOP], check=True),
    "starts_python": lambda: subprocess.run([sys.executable, "-c", PYTHON_LOOP], check=True),
    "loads_and_computes": lambda: load(compute),
    "loads_and_reads": lambda: load(lambda: each(read)),
    "reads": lambda: each(read),
    "writes": lambda: each(write),
    "saves": lambda: each(lambda: torch.save(torch.zeros(999), HERE / f"saved-{os.getpid()}")),
    "copies": lambda: each(lambda: shutil.copy(__file__, HERE / f"copied-{os.getpid()}")),
    "prints": lambda: each(lambda: print("evaluated one more", flush=True)),
    "reads_a_pipe": reads_a_pipe,
    "downloads": downloads,
    "downloads_by_http": downloads_by_http,
    "uploads": uploads,
}


def in_c():
    import ctypes

    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    while lock(mutex) == 0:
        pass


def locks_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_for_a_lock_of_another():
    path = HERE / "lock"
    held = FORK.Event()
    take = (lambda: fcntl.flock(os.open(path, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX), held.set, idle)
    FORK.Process(target=lambda: [act() for act in take]).start()
    held.wait()
    fcntl.flock(os.open(path, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def opens_a_fifo():
    os.mkfifo(HERE / "fifo")
    os.open(HERE / "fifo", os.O_RDONLY)


def hears_nothing():
    near, _far = socket.socketpair()
    near.recv(1)


def joins_a_thread():
    thread = threading.Thread(target=idle, daemon=True)
    thread.start()
    thread.join()


def idle():
    time.sleep(600.0)


def of_an_event_loop():
    import asyncio

    async def wait():
        await asyncio.Event().wait()

    asyncio.run(wait())


HANGS = {
    "sleeps": idle,
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "in_c": in_c,
    "locks_twice": locks_twice,
    "of_a_queue": lambda: queue.Queue().get(),
    "of_a_queue_of_processes": lambda: FORK.Queue().get(),
    "of_a_semaphore": lambda: FORK.Semaphore(0).acquire(),
    "hears_nothing": hears_nothing,
    "reads_an_empty_pipe": lambda: os.read(os.pipe()[0], 1),
    "opens_a_fifo": opens_a_fifo,
    "waits_for_a_child": lambda: subprocess.run(["sleep", "600"], check=True),
    "waits_for_a_loader": lambda: load(idle),
    "waits_for_a_lock_of_another": waits_for_a_lock_of_another,
    "joins_a_thread": joins_a_thread,
    "waits_for_a_signal": lambda: signal.sigwait({signal.SIGUSR1}),
    "of_an_event_loop": of_an_event_loop,
    "asks_the_store": lambda: dist.distributed_c10d._get_default_store().get("nobody sets this"),
    "leaves_out_a_collective": dist.barrier,
}


def main():
    kind, who = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if ddp := sys.argv[3:]:
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)

    def train(steps):
        for _ in range(steps):
            net(torch.ones(2, 4)).sum().backward()
            for one in () if ddp else net.parameters():
                dist.all_reduce(one.grad)
            optimizer.step()

    train(25)
    if os.environ["NVRX_CYCLE"] == "0" and dist.get_rank() == who:
        (PAUSES | HANGS)[kind]()
    train(5)
    dist.barrier()
    os._exit(0)


main()
