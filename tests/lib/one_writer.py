"""Workers that write all the time, in processes of several shapes, and stop or kill their own agent: no rank may have
two writers at once. For loopback and for a real Slurm; NVRX_REPEATS=20 runs each case 20 times."""

import os
from collections import defaultdict

REPEATS = range(int(os.environ.get("NVRX_REPEATS", "1")))
SHAPES = {  # how a worker begins; its last process writes
    "setsid": "if os.fork():\n    os.wait()\n    sys.exit()\nos.setsid()\n",
    "popen": "if 'x' not in sys.argv:\n    sys.exit(subprocess.call([*sys.orig_argv, 'x'], start_new_session=True))\n",
    "daemon": "ends, its = os.pipe()\nif os.fork():\n    os.close(its), os.read(ends, 1), sys.exit()\n"
    "os.setsid()\nif os.fork():\n    os._exit(0)\n",
    "plain": "",
    "first": "",  # its agent is stopped with the first instruction of the rank
    "spare": "",  # the same, and that node was a spare before
}
CASES = [*(("stopped", shape) for shape in SHAPES), *(("killed", shape) for shape in ("setsid", "popen", "daemon"))]
HEAD = """
import os, signal, subprocess, sys, time
AGENT = int(os.environ.setdefault("AGENT", str(os.getppid())))
def strike(count):
    if RANK == 0 and STRIKES.get(CYCLE, (-1,))[0] == count:
        with open("struck", "a") as file:
            file.write(f"{AGENT}\\n")
        os.kill(AGENT, STRIKES[CYCLE][1])
strike(0)
"""
# Time, rank and pid, until the file `endCYCLE` is there.
WRITES = """
count = 0
with open("written", "a", buffering=1) as file:
    while not os.path.exists(f"end{CYCLE}"):
        file.write(f"{time.monotonic_ns()} {RANK} {os.getpid()}\\n")
        time.sleep(0.002)
        count += 1
        strike(count)
"""


def worker(fault, shape):
    """The code of a rank, after a head with RANK and CYCLE. By cycle: after how many lines rank 0 signals its agent."""
    usual = {"stopped": {0: (50, 19)}, "killed": {0: (50, 9)}, "": {}}[fault]
    strikes = {"first": {0: (0, 19)}, "spare": {0: (50, 9), 1: (0, 19)}}.get(shape, usual)
    return f"STRIKES = {strikes}\n{HEAD}{SHAPES[shape]}{WRITES}"


def writers(written):
    """By rank: the first and last time of each of its processes, in order; the test fails where they overlap."""
    lives = defaultdict(lambda: defaultdict(list))
    for line in written.read_text().rpartition("\n")[0].splitlines() if written.exists() else ():
        at_ns, rank, pid = map(int, line.split())
        lives[rank][pid].append(at_ns)
    found = {rank: sorted((min(times), max(times)) for times in of.values()) for rank, of in lives.items()}
    for spans in found.values():
        assert all(before[1] < after[0] for before, after in zip(spans, spans[1:], strict=False)), found
    return found
