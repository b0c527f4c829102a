"""Helpers that outlive their rank and clean up: they end before the next cycle starts, and nothing is left."""

from pathlib import Path

import pytest
from agent_harness import CLIENT
from test_orphans import gone

pytestmark = pytest.mark.process


SHM = Path("/dev/shm")
# Named segments and semaphores, which a child holds, too; `note` tells their names. Spawned children import this file.
RESOURCES = """
from multiprocessing import get_context, shared_memory
def note(*names):
    with open(os.path.join(os.environ["NVRX_TEST_GATES"], "names"), "a") as file:
        file.write("".join(f"{name}\\n" for name in names))
def make():
    segment = shared_memory.SharedMemory(f"{os.path.basename(os.environ['NVRX_TEST_GATES'])}-{RANK}", True, 100)
    spawn = get_context("spawn")
    locks = [spawn.Lock() for _ in range(3)]
    child = spawn.Process(target=time.sleep, args=(1000,), daemon=True)
    child.start()
    note(segment.name, *("sem." + lock._semlock.name.lstrip("/") for lock in locks))
    return segment, locks, child
"""


def names(rig):
    return (rig.dir / "names").read_text().split()


def left(rig):
    return [name for name in names(rig) if (SHM / name).exists()]


@pytest.mark.parametrize(
    "dies, waits, flags",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "forever()", ()),
        ("forever()", "forever()", ("--ft-rank-heartbeat-timeout=0.3",)),  # its monitor kills it
        ("os._exit(1)", "signal.signal(signal.SIGTERM, lambda *_: None), forever()", ("--workers-stop-timeout=0.3",)),
        ("sys.exit(1)", "sys.exit()", ()),
    ],
)
def test_what_a_rank_has_made_is_gone_before_the_next_cycle(rig, dies, waits, flags):
    script = rig.script(RESOURCES + f"""
if __name__ == "__main__":
    {CLIENT.strip().replace(chr(10), chr(10) + "    ")}
    kept = make()  # fails with FileExistsError where the segment of the last cycle is left
    client.send_heartbeat()
    say("made", CYCLE)
    if CYCLE < 2:
        gate(f"go{{CYCLE}}")
        ({dies}) if RANK else ({waits})
    client.shutdown_workload_monitoring()
""")  # fmt: skip
    one = rig.run(script, "--nproc-per-node=2", "--max-restarts=2", *flags)
    for cycle in (0, 1):
        for rank in (0, 1):
            one.line(rf"\[rank {rank}\] made {cycle}")
        rig.open(f"go{cycle}")
    assert one.wait() == 0
    assert len(names(rig)) == 3 * 2 * 4 and left(rig) == []


def test_a_helper_that_does_not_end_is_killed_after_a_while(rig):
    script = rig.script("""
import multiprocessing
pids = os.path.join(os.environ["NVRX_TEST_GATES"], "pids")
if CYCLE == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(pids, "w").write(str(os.getpid()))
        forever()
    while not os.path.exists(pids) or not open(pids).read():
        os.sched_yield()
    os._exit(1)
say("gone", not os.path.exists("/proc/" + open(pids).read()))
""")  # fmt: skip
    one = rig.ran(script, "--max-restarts=1")
    one.line("gone True")
    assert gone(int((rig.dir / "pids").read_text()))


@pytest.mark.torch
def test_the_shared_memory_manager_of_torch_cleans_up(rig):
    """It holds the pipe of the resource tracker and ends two seconds after the rank."""
    script = rig.script(RESOURCES + """
if __name__ == "__main__":
    import torch
    torch.multiprocessing.set_sharing_strategy("file_system")
    kept = make()
    shared = torch.ones(100).share_memory_()
    note(*(name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")))
    if CYCLE == 0:
        os.kill(os.getpid(), signal.SIGKILL)
""")  # fmt: skip
    one = rig.run(script, "--max-restarts=1", "--ft-preload=torch")
    assert one.wait(90.0) == 0
    assert sum(name.startswith("torch_") for name in names(rig)) == 2 and left(rig) == []
    assert [path for path in (rig.dir / "tmp").iterdir()] == []
