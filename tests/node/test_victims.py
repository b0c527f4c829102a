"""A victim ends before the culprit, which still dumps core, flushes, or aborts: the culprit is the first cause."""

import pytest
from agent_harness import UP

pytestmark = pytest.mark.process

WAITS = {"0": 0.0, "10 ms": 0.01, "50 ms": 0.05, "300 ms": 0.3, "2 s": 2.0}
# What the culprit does. `left()` lets the victim end, and waits for that, and longer.
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
XID = "os.write(2, b'NVRM: Xid (PCI:0000:5d:00): 119, pid=1, Timeout\\n')\n"
OOM = "os.write(2, b'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\\n')\n"
ECC = "CUDA error: uncorrectable ECC error encountered"
WAYS = {
    "aborts as NCCL does": f"{IGNORE}os.write(2, b'  what():  {ECC}\\n')\nleft()\nos.abort()\n",
    "dumps core": f"{IGNORE}{XID}left()\nos.kill(os.getpid(), 11)\n",
    "is stopped as it flushes": "atexit.register(left)\nraise ValueError('a bad sample')\n",
    "flushes to the end": f"{IGNORE}atexit.register(left)\nraise ValueError('a bad sample')\n",
    "cleans up before it tells": f"{IGNORE}try:\n    raise KeyError('text')\nfinally:\n    left()\n",
    "tells after": f"{IGNORE}left()\nraise RuntimeError('{ECC}')\n",
    "is stopped by a signal": f"{XID}left()\nforever()\n",
    "exits with a code": f"{IGNORE}{OOM}left()\nos._exit(7)\n",
}
VICTIM = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
JOB = (
    UP
    + """
import atexit
GATES = os.environ["NVRX_TEST_GATES"]
def left():
    open(os.path.join(GATES, "told"), "w").close()
    while not os.path.exists(os.path.join(GATES, "victim")):
        time.sleep(0.001)
    time.sleep({wait_s})
if CYCLE == 0 and RANK == 0:
    while not os.path.exists(os.path.join(GATES, "told")):
        time.sleep(0.001)
    os.write(2, b"{victim}\\n")
    open(os.path.join(GATES, "victim"), "w").close()
    os._exit(1)
if CYCLE == 0:
{culprit}
"""
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wait", WAITS)
def test_the_culprit_is_named(rig, wait, way):
    restarts = (list(WAITS).index(wait) + list(WAYS).index(way)) % 2  # the next placement knows it, or the end does
    culprit = "".join(f"    {line}\n" for line in WAYS[way].splitlines())
    script = rig.script(JOB.format(wait_s=WAITS[wait], victim=VICTIM, culprit=culprit))
    nodes = rig.nodes(2, "2:2", script, f"--max-restarts={restarts}")
    ends = {node.wait() for node in nodes}
    told = rig.result["restarts"][0] if restarts else rig.result["first_cause"]
    assert told["rank"] == 1, told
    assert restarts or ends == {1}
    assert sum("victim" in node.text for node in nodes) == 1  # on the console of the coordinator's node


STOPPED = (
    UP
    + """
if RANK == 1:
    for rank in (0, 2, 3):
        gate(f"ready{{rank}}")
    os._exit(7)
if RANK == 0:
    os.write(2, b"Traceback (most recent call last):\\n  File 't.py', line 1, in f\\n{victim}\\n")
if RANK == 2:
    signal.signal(signal.SIGTERM, lambda *args: os.write(2, b"received SIGTERM\\n") and os._exit(143))
if RANK == 3:
    def end(*args):  # as Lightning's handler does
        os.write(2, b"Traceback (most recent call last):\\n  File 't.py', line 1, in f\\nSIGTERMException\\n")
        os._exit(1)
    signal.signal(signal.SIGTERM, end)
path = os.path.join(os.environ["NVRX_TEST_GATES"], f"ready{{RANK}}")
try:
    os.mkfifo(path)
except FileExistsError:
    pass
open(path, "w").close()  # waits for rank 1
forever()
"""
)


def test_a_victim_that_is_stopped_is_named(rig):
    """A rank that ends because of SIGTERM is no victim, also where its handler raises."""
    nodes = rig.nodes(1, "1:1", rig.script(STOPPED.format(victim=VICTIM)), "--nproc-per-node=4")
    assert nodes[0].wait() == 1
    assert rig.result["first_cause"]["rank"] == 1
    assert "received SIGTERM" in nodes[0].text and "SIGTERMException" in nodes[0].text
    named = [line for line in nodes[0].text.splitlines() if "victim" in line]
    assert [line.partition("rank ")[2] for line in named] == ["0"], nodes[0].text
