"""Ranks that must not be forked as they are begin again, executed: when, how often, and what is said."""

import os
import signal

import pytest
from test_warm import SOON, alike, imports, up, waiting
from waits import until

pytestmark = pytest.mark.process


SETS = """
before = "moody" in getattr(sys.meta_path[0], "parked", ())
if len(sys.argv) > 2:
    import socket
    server = socket.create_server(("127.0.0.1", 0))
os.environ["MOOD"] = "good"
import moody
say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), moody.MOOD)
if CYCLE < int(sys.argv[1]):
    forever()
"""
MOODY = """
import os
MOOD = os.environ.get("MOOD", "none")
with open(os.path.join(os.environ["NVRX_TEST_GATES"], "imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def test_a_script_that_sets_what_an_import_has_read_is_executed_and_then_forked_with_it(rig):
    (rig.dir / "moody.py").write_text(MOODY)
    one = rig.run(rig.script(SETS), "--nproc-per-node=2", "--max-restarts=1", SOON, "--ft-preload=moody", args=("1",))
    found = [up(one, 0, rank) for rank in (0, 1)]
    assert [(how, mood) for how, _, mood in found] == [("executed", "good")] * 2
    assert sum("export MOOD=..." in said for said in one.said) == 1
    until(lambda: imports(rig) == 4, "a template, two ranks, and a template with that variable")
    waiting(one, [pid for _, pid, _ in found])
    os.kill(found[0][1], signal.SIGKILL)
    assert one.wait() == 0
    assert [up(one, 1, rank)[::2] for rank in (0, 1)] == [("forked", "good")] * 2
    assert imports(rig) == 4


def test_ranks_that_others_may_know_start_again_which_uses_no_restart(rig):
    (rig.dir / "moody.py").write_text(MOODY)
    flags = ("--nproc-per-node=2", "--max-restarts=0", SOON, "--ft-preload=moody")
    one = rig.ran(rig.script(SETS), *flags, args=("0", "has a connection"))
    assert [up(one, 1, rank)[::2] for rank in (0, 1)] == [("executed", "good")] * 2
    assert "up 0" not in one.text and any("all ranks are executed" in said for said in one.said)


BY_A_PACKAGE = """
before = "torch" in getattr(sys.meta_path[0], "parked", ())
import lightning
say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), os.environ["MOOD"])
"""
PACKAGE = """
import os
os.environ["MOOD"] = "good"
import torch
"""


def test_a_package_that_sets_a_variable_before_torch_is_forked_from_the_first_cycle_on(rig):
    pytest.importorskip("torch")
    packages = rig.dir / "packages"
    packages.mkdir()
    (packages / "lightning.py").write_text(PACKAGE)
    one = rig.ran(rig.script(BY_A_PACKAGE), "--nproc-per-node=1", PYTHONPATH=str(packages))
    assert up(one, 0, 0)[::2] == ("forked", "good")


QUIETLY = """
os.environ._data[b"MOOD"] = b"good"
import moody
say("up", CYCLE, "rank", RANK, "forked" if "moody" in getattr(sys.meta_path[0], "entries", {}) else "executed",
    "pid", os.getpid(), moody.MOOD)
"""


def test_a_module_that_reads_late_is_compared_at_its_import(rig):
    """Also where no call has told that the variable was set."""
    (rig.dir / "moody.py").write_text(MOODY)
    one = rig.ran(rig.script(QUIETLY), "--nproc-per-node=1", "--ft-preload=moody", args=("0",))
    assert up(one, 0, 0)[::2] == ("executed", "good")


CLEARS = """
before = "moody" in getattr(sys.meta_path[0], "parked", ())
variables = dict(os.environ)
os.environ.clear()
os.environ.update(variables)
import moody
say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), moody.MOOD)
"""


def test_variables_that_are_unset_for_a_moment_are_as_they_were(rig):
    (rig.dir / "moody.py").write_text(MOODY)
    one = rig.ran(rig.script(CLEARS), "--nproc-per-node=1", "--ft-preload=moody", MOOD="good")
    assert up(one, 0, 0)[::2] == ("forked", "good")


DIFFERS = """
before = "moody" in getattr(sys.meta_path[0], "parked", ())
if len(sys.argv) > 2:
    import socket
    server = socket.create_server(("127.0.0.1", 0))
if RANK or {both}:
    os.environ["MOOD"] = f"good{{RANK}}"
import moody
say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), moody.MOOD)
gate(f"end{{CYCLE}}")
"""

WANTS = """
from nvrx_slurm.node.workers.launcher import Launcher
want = Launcher._want
def told(self):
    want(self)
    print("wanted", flush=True)
Launcher._want = told
"""


@pytest.mark.parametrize("both", [True, False], ids=["by rank", "one rank only"])
@pytest.mark.parametrize("args", [(), ("has a connection",)], ids=["anew", "restart"])
def test_values_that_differ_by_rank_are_exact_in_each_cycle(rig, both, args):
    (rig.dir / "moody.py").write_text(MOODY)
    rig.before = WANTS
    flags = ("--nproc-per-node=2", "--max-restarts=3", SOON, "--ft-preload=moody")
    one = rig.run(rig.script(DIFFERS.format(both=both)), *flags, args=("0", *args))
    cycle = -1
    for _ in range(4):
        later = "|".join(map(str, range(cycle + 1, cycle + 4)))
        # One rank may get there in a cycle in which the other has to be executed.
        both_up = rf"up ({later}) rank \d .*\n(?:.*\n)*?.*up \1 rank \d "
        cycle = int(one.line(both_up)[1])
        ranks = [up(one, cycle, rank) for rank in (0, 1)]
        assert [mood for _, _, mood in ranks] == ["good0" if both else "none", "good1"]
        one.line(rf"up {cycle} rank 1 .*\n(?:.*\n)*?wanted$")
        until(lambda: len(alike(one)) == 5, "all ranks have a standby, and there is a template")
        os.kill(ranks[1][1], signal.SIGKILL)
    assert one.wait() == 1 and rig.result["restarts_used"] == 3
    assert [sum(word in said for said in one.said) for word in ("ranks begin again", "MOOD to values")] == [1, 1]
    most_free = 3 * bool(args)  # of restarts that use none of --max-restarts
    assert cycle <= 3 + most_free
