"""Ranks of torch that were told to end: those that wait in C are killed soon, those that save are not."""

import pytest

pytestmark = pytest.mark.process


# Ranks 0 and 1 wait in C, one of them in a collective; each other one saves in its own way; the last one is killed.
SCRIPT = """
import ctypes, queue, select, socket, threading
import torch
import torch.distributed as dist
from torch.utils.data._utils.pin_memory import _pin_memory_loop

SAVES_S = 2.0  # idle ranks are killed after 0.4 s
event = threading.Event()
ours, theirs = socket.socketpair()

def work(step):
    until_s = time.monotonic() + SAVES_S
    while time.monotonic() < until_s:
        step()

def compute():
    torch.rand(100, 100).inverse()

def write():
    with open(os.path.join(os.environ["NVRX_TEST_GATES"], f"saved{RANK}"), "wb") as file:
        file.write(bytes(1 << 16))
        os.fsync(file.fileno())
    time.sleep(0.6)

def send():
    for one in select.select([], [ours], [], 0.01)[1]:
        one.send(bytes(1000))

def run(target, *args):
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread

def save(*_):
    if way == "computes":
        work(compute)
    elif way == "writes":
        work(write)
    elif way == "sleeps":
        time.sleep(SAVES_S)
    elif way == "sends":
        work(send)
    elif way == "starts a process":
        code = f"import time; time.sleep({SAVES_S})"
        subprocess.run([sys.executable, "-c", code], start_new_session=True)
    elif way == "starts a thread":
        run(work, compute).join()
    elif way == "wakes a thread":
        return event.set()
    end()

def end():
    say("saved" if way else "handled")
    os._exit(0)

# Threads of libraries.

def upload():
    event.wait()
    work(send)
    end()

def receive():
    while theirs.recv(100):
        time.sleep(0.01)

def profile():
    while True:
        time.sleep(0.01)
        for frame in sys._current_frames().values():
            frame.f_back

def track():
    while True:
        time.sleep(0.05)
        with open("/proc/self/status") as status:
            status.read()

way = sys.argv[1 + RANK]
say("up", CYCLE)
if CYCLE:
    sys.exit()
signal.signal(signal.SIGTERM, save)
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
for target in (upload, receive, profile, track):
    run(target)
run(_pin_memory_loop, torch.multiprocessing.Queue(), queue.Queue(), 0, threading.Event(), "cpu")
dist.barrier()
say("ready")
if RANK == 0:
    dist.all_reduce(torch.ones(1), group=pair)
elif RANK == 1:
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)
elif RANK + 2 < len(sys.argv):
    time.sleep(1000)
gate()
os._exit(1)
"""
WAYS = ("computes", "writes", "sleeps", "sends", "starts a process", "starts a thread", "wakes a thread")
FLAGS = ("--max-restarts=1", "--workers-stop-timeout=600", "--ft-stop-idle-timeout=0.4", "--ft-preload=torch")


@pytest.mark.torch
@pytest.mark.parametrize("ways", [(), WAYS])
def test_ranks_that_wait_in_c_are_killed_soon_and_those_that_save_are_not(rig, ways):
    args = ("", "", *ways, "")
    one = rig.run(rig.script(SCRIPT), f"--nproc-per-node={len(args)}", *FLAGS, args=args)
    for rank in range(len(args)):
        one.line(rf"\[rank {rank}\] ready", 60.0)
    rig.ends_well("go", one)
    said = {rank: rig.log(0, rank, "out").split("\n")[2:] for rank in range(len(args) - 1)}
    assert said == {rank: ["saved", ""] if rank > 1 else [""] for rank in said}
