"""A worker that does what its ROLE_NAME says. `decimal` is in the template only."""

import atexit
import multiprocessing
import os
import random
import signal
import sys
import threading


class Shape:
    """To be sent."""

    def __init__(self, side):
        self.side = side


def double(number):
    return 2 * number


def sleepy():
    print("thread", flush=True)


def fail():
    raise ValueError("as asked")


def pool(method):
    with multiprocessing.get_context(method).Pool(2) as workers:
        print(workers.map(double, [1, 2, 3]))


def process(method):
    context = multiprocessing.get_context(method)
    child = context.Process(target=print, args=("child",))
    child.start()
    child.join()
    print(child.exitcode)


def pipe():
    ours, theirs = multiprocessing.Pipe()
    theirs.send(Shape(7))
    print(ours.recv().side)


def end_in_atexit():
    atexit.register(print, "first registered, last called")
    atexit.register(print, "last registered, first called")


ENDS = {
    "success": lambda: print("well"),
    "exit 3": lambda: sys.exit(3),
    "exit with text": lambda: sys.exit("some text"),
    "exit at once": lambda: os._exit(4),
    "uncaught exception": fail,
    "KeyboardInterrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGUSR1 is ignored": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "SIGSEGV with stacks": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGABRT with stacks": os.abort,
    "atexit": end_in_atexit,
    "thread at exit": lambda: threading.Timer(0.05, sleepy).start(),
    "a class of main through a pipe": pipe,
    "pool by spawn": lambda: pool("spawn"),
    "pool by fork": lambda: pool("fork"),
    "process by spawn": lambda: process("spawn"),
    "process by forkserver": lambda: process("forkserver"),
    "random numbers": lambda: print("random", random.random()),
    "hash": lambda: print("hash", hash("text")),
    "broken pipe": lambda: os.write(os.pipe()[1], b"x"),
    "module frames": lambda: print([frame.f_code.co_filename for frame in sys._current_frames().values()]),
}

if __name__ == "__main__":
    if os.environ["ROLE_NAME"] != "forked":
        ENDS[os.environ["ROLE_NAME"]]()
    else:
        print("decimal" in getattr(sys.meta_path[0], "parked", ()))
