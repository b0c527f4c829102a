"""The user's script of `restart-handler`, with ranks that wait in C; see `worker.py`.

torch_worker.py handler  say "started"; join a gloo group with a handler of SIGTERM in Python, say "blocked";
                         rank 1 waits in C for good, the first and others wait for it in a collective, the last sleeps
torch_worker.py saving   say "started"; join a gloo group, say "blocked"; on SIGTERM write, sync and sleep for 10 s, say
                         "saved" and end
"""

import time

first_line_s = time.monotonic()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

LONGEST_LIFE_S = float(os.environ["BENCH_LIFE_S"])
SAVE_S = 10.0


def tell(what, at_s):
    """As `worker.py` does."""
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, f"{what} {os.environ['RANK']} {os.getpid()} {at_s:.6f}\n".encode())
    os.close(fd)


def grouped(on_sigterm):
    """A gloo group of all ranks, and one of all but the last; a tracker's thread that looks around now and then."""
    import threading

    signal.signal(signal.SIGTERM, on_sigterm)
    tell("started", first_line_s)
    import torch

    def track():
        while True:
            time.sleep(0.1)
            with open("/proc/self/status") as status:
                status.read()

    threading.Thread(target=track, daemon=True).start()
    torch.distributed.init_process_group("gloo")
    rest = torch.distributed.new_group(range(torch.distributed.get_world_size() - 1))
    tell("blocked", time.monotonic())
    return torch, rest


def handler():
    """The main thread does not come back to Python, as in a collective whose peer is dead or waits for a dead one."""
    torch, rest = grouped(lambda *_: os._exit(0))
    if rest == torch.distributed.GroupMember.NON_GROUP_MEMBER:
        time.sleep(LONGEST_LIFE_S)
    elif torch.distributed.get_rank() == 1:
        import ctypes

        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        while lock(mutex) == 0:
            pass
    torch.distributed.all_reduce(torch.ones(1), group=rest)


def saving():
    """A checkpoint that takes SAVE_S, to a slow disk."""

    def save(*_):
        until_s = time.monotonic() + SAVE_S
        while time.monotonic() < until_s:
            with open(os.path.join(os.environ["TMPDIR"], f"checkpoint{os.environ['RANK']}"), "wb") as file:
                file.write(bytes(1 << 20))
                os.fsync(file.fileno())
            time.sleep(1.5)  # longer than a rank that does nothing is waited for
        tell("saved", time.monotonic())
        os._exit(0)

    grouped(save)
    time.sleep(LONGEST_LIFE_S)


{"handler": handler, "saving": saving}[sys.argv[1]]()
