"""A node on which each rank fails gives its place to a spare, however it fails; a rank that fails moves no node."""

import sys
from pathlib import Path

import pytest
from agent_harness import CLIENT, UP

pytestmark = pytest.mark.process


FLAGS = ("--ft-crash-loop-backoff=0",)
RANKS = (
    UP
    + """
NODE = int(os.environ["NVRX_INFRA_RANK"])
if PRINTS:
    say("iteration", 9), say("iteration", 10)
"""
)


def _ways(table):
    return dict(line.split(": ", 1) for line in table.strip().split("\n"))


# How only a node can fail its ranks.
NODES = _ways(
    r"""
device: raise RuntimeError('No CUDA GPUs are available')
library: raise ImportError('libcuda.so.1: cannot open shared object file: Input/output error')
file: open('/proc/self/mem', 'rb').read(1)
shared-memory: open('/dev/full', 'wb', 0).write(b'x')
SIGBUS: import mmap; f = open('map', 'w+b'); f.truncate(1); m = mmap.mmap(f.fileno(), 1); f.truncate(0); m[0]
SIGSEGV: import ctypes; ctypes.string_at(0)
exit-1: os._exit(1)
after-6-s: time.sleep(6); raise RuntimeError('CUDA error: unspecified launch failure')
after-10-steps: [say('iteration', n) for n in range(10)]; raise RuntimeError('CUDA error: unknown error')
descriptors: import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); open('/dev/null')
processes: import resource; resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)); os.setuid(65534); os.fork()
killed: os.kill(os.getpid(), signal.SIGKILL)
hang: forever()
not-executable: pass
"""
)
SCRIPTS = _ways(
    r"""
value: raise ValueError('bad sample')
key: {}['text']
decode: b'\xff'.decode()
json: json.loads('{')
assertion: assert RANK != 1
end-of-file: raise EOFError('shard ends')
missing: open('shard-1')
runtime: raise RuntimeError('shapes differ')
exit-3: os._exit(3)
SIGSEGV: os.kill(os.getpid(), signal.SIGSEGV)
"""
)
WAITS = """
def barrier():
    gate(f"end{CYCLE}")
barrier()
"""
OF_CODE = ("value", "key", "decode", "assertion")


def program(rig, text, interpreter):
    """The script as a program of its own, for an interpreter that may be missing."""
    path = Path(rig.script(text, f"program.{Path(interpreter).parts[1]}"))
    path.write_text(f"#!{interpreter}\n{path.read_text()}")
    path.chmod(0o755)
    return str(path)


def strikes(rig):
    file = rig.logs / "strikes.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def cases(ways, *quick, sizes=()):
    """Each way with 2 active nodes, printed iterations and none; the `quick` ones with `sizes`, too. Only a few are
    always run."""
    every = [(way, prints, 2) for way in ways for prints in (False, True)]
    more = [(way, True, size) for way in quick for size in sizes]
    first = [(way, False, 2) for way in quick]
    return [pytest.param(*one, marks=[] if one in first else pytest.mark.matrix) for one in every + more]


@pytest.mark.parametrize("way, prints, size", cases(NODES, "exit-1", "hang", "not-executable", sizes=(8,)))
def test_a_spare_takes_the_place_of_a_bad_node(rig, way, prints, size):
    fails = f"if NODE == 1:\n    {NODES[way]}\n"
    text = f"PRINTS = {prints}\n{RANKS}{fails}{CLIENT}{WAITS}"
    good, flags = rig.script(text), [*FLAGS, "--max-restarts=2"]
    bad = good
    if way == "hang":
        flags.append("--ft-rank-init-timeout=4")
    if way == "not-executable":
        flags.append("--no-python")
        good, bad = (program(rig, text, interpreter) for interpreter in (sys.executable, "/nonexistent/python"))
    rig.open("end2")
    nnodes = f"{size}:{size + 1}"
    nodes = [rig.node(rank, nnodes, bad if rank == 1 else good, *flags) for rank in range(size + 1)]
    assert {node.wait() for node in nodes} == {0}
    found = rig.result
    assert (found["restarts_used"], len(found["spares_used"]), len(strikes(rig))) == (2, 1, 1)
    assert not found["excluded_nodes"]


@pytest.mark.parametrize("way, prints, size", cases(SCRIPTS, "value", "exit-3"))
def test_what_fails_with_its_rank_moves_no_node(rig, way, prints, size):
    """Where a node might do that, too, a spare tries it; then the node has its place back, if it is ready by then."""
    text = f"PRINTS = {prints}\n{RANKS}if RANK == 1:\n    {SCRIPTS[way]}\n{WAITS}"
    nodes = rig.nodes(size + 1, f"{size}:{size + 1}", rig.script(text), *FLAGS, "--max-restarts=4")
    codes = {node.wait() for node in nodes}
    assert not strikes(rig) and not rig.result["excluded_nodes"]
    if codes == {93}:  # "code or data", as the iterations tell
        assert prints
        return
    assert codes == {1}
    assert nodes[2].cycles[:1] == ([] if way in OF_CODE else [2])
