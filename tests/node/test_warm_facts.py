"""What a training script finds does not depend on who starts it: python, torchrun, or nvrx-run in any cycle.

Its facts are those of `data/warm_facts/train.py`, with real torch. Each way to change something is one run of each.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import kill, says
from test_status_file import OFTEN, told

pytestmark = pytest.mark.process


DATA = Path(__file__).parents[1] / "data" / "warm_facts"
SOON, BOUND_S = "--ft-crash-loop-backoff=0", 120.0
LEAST_FACTS = 120

# Tells when all standbys have what is known that ranks import, under the variables that they have set before.
WARM = """
from nvrx_slurm.node.workers.launcher import Launcher
tell = Launcher._tell_warmth
def told(self):
    tell(self)
    wanted = [*self._learned.modules()]
    for one in self._templates:
        if not one.is_busy and not one._more and all(module in wanted for module in one.modules):
            has_all = all(self._has_standby(rank) for rank in range(self.nproc))
            names = [f"{name}/{len(changes)}" for name, changes in one.modules]
            print("standbys" if has_all else "none", "have", *names, flush=True)
Launcher._tell_warmth = told
"""
REEXPORTS = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("real", {path!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
globals().update({{name: value for name, value in vars(real).items() if not name.startswith("__")}})
"""


def _variables(when):
    return dict(line.split("=", 1) for line in (DATA / f"{when}.env").read_text().splitlines())


def _lay_out(rig):
    """The script with all that is beside it."""
    shutil.copytree(DATA, rig.dir, dirs_exist_ok=True)
    whens = ("before", "after")
    (rig.dir / "config.json").write_text(json.dumps({"env": {when: _variables(when) for when in whens}}))
    import queue

    import typing_extensions

    (rig.dir / "queue.py").write_text(REEXPORTS.format(path=queue.__file__))
    for when in whens:
        (rig.dir / f"presets_{when}.py").write_text(f"import os\nos.environ.update({_variables(when)!r})\n")
        (rig.dir / f"other_{when}").mkdir()
        other = rig.dir / f"other_{when}" / "typing_extensions.py"
        other.write_text(REEXPORTS.format(path=typing_extensions.__file__))


class Runs:
    """The runs of one way. Each writes its facts."""

    def __init__(self, rig, way):
        self._rig, self._way = rig, way
        self._script = str(rig.dir / "train.py")
        self._args = [way]
        if way == "arguments":
            for when in ("before", "after"):
                self._args += [f"--{when}={name}={value}" for name, value in _variables(when).items()]
        _lay_out(rig)
        rig.before += WARM

    def _more(self, label, cycles=0):
        more = {"FACTS_OUT": str(self._rig.dir), "FACTS_LABEL": label, "FACTS_CYCLES": str(cycles)}
        return {**more, "PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"}  # nvrx-run sets the second one

    def alone(self, label, *command):
        """Of a process that `command` starts."""
        subprocess.run(
            [sys.executable, *command, self._script, *self._args],
            env=self._rig.env(**self._more(label)), cwd=self._rig.dir, timeout=BOUND_S, check=True,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        return self.facts(label, 9)[1]

    def start(self, label, cycles, *flags):
        args = tuple(self._args)
        more = self._more(label, cycles)
        return self._rig.run(self._script, f"--max-restarts={cycles}", SOON, *flags, args=args, **more)

    def came(self, one, cycle):
        return int(one.line(rf"came {cycle} pid (\d+)$", BOUND_S)[1])

    def settled(self, one, cycle):
        """Waits until the standbys of the next cycle are as they will be; what they have."""
        return one.line(rf"came {cycle} pid \d+\n(?:.*\n)*?standbys have(.*torch\._dynamo.*)$", BOUND_S)[1]

    def facts(self, label, cycle):
        path = self._rig.dir / f"{self._way}-{label}-{cycle}"
        found = json.loads(path.with_name(path.name + ".json").read_text())
        found["facts"]["order of ends"] = json.loads(path.with_name(path.name + ".end.json").read_text())
        return found["forked"], found["facts"]


def _differences(expected, facts):
    """Name, what is expected, what is found; of longer ones only what differs."""
    found = {}
    for name in expected.keys() | facts.keys():
        one, other = expected.get(name), facts.get(name)
        if one == other:
            continue
        found[name] = one, other
        if isinstance(one, (list, dict)) and isinstance(other, type(one)):
            items, others = ([*each.items()] if isinstance(each, dict) else each for each in (one, other))
            gone, new = [each for each in items if each not in others], [each for each in others if each not in items]
            first = next((pair for pair in zip(items, others, strict=False) if pair[0] != pair[1]), ())
            found[name] = (gone[:9], new[:9]) if gone or new else ("order", *first)
    return found


BY_HAND = pytest.mark.skipif("NVRX_ALL_FACTS" not in os.environ, reason="takes an hour; set NVRX_ALL_FACTS=1")
WAYS = (
    "nothing", "item", "setdefault", "update", "bytes", "putenv", "unset", "loader", "arguments", "json", "yaml",
    "package", "hook", "affinity", "path", "logging", "warnings", "order", "thread", "tempfile",
)  # fmt: skip
# C code reads other values than Python code does, the script has loggers of torch or a folder for temporary files that
# is no longer the one of TMPDIR, its path has other modules, it has an import hook for torch or other processors.
EXECUTED = {"putenv", "logging", "path", "unset", "hook", "affinity"}


EACH_WAY = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "item" else [pytest.mark.matrix, BY_HAND]) for way in WAYS]
)


@pytest.mark.torch
@EACH_WAY
def test_facts_of_each_cycle(rig, way):
    pytest.importorskip("torch")
    runs = Runs(rig, way)
    one = runs.start("warm", 2)
    expected = runs.alone("python", "-u")
    assert len(expected) >= LEAST_FACTS
    for cycle in (0, 1, 2):
        runs.came(one, cycle)
        if cycle < 2 and way not in EXECUTED:
            runs.settled(one, cycle)
        rig.open(f"end{cycle}")
    assert one.wait(BOUND_S) == 0
    for path in (rig.dir / "tmp").glob("torchinductor_*"):
        shutil.rmtree(path)
    found = [runs.facts("warm", cycle) for cycle in (0, 1, 2)]
    assert [_differences(expected, facts) for _, facts in found] == [{}, {}, {}]
    assert way in EXECUTED or found[1][0] and found[2][0]


@BY_HAND
@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
def test_facts_of_other_starts(rig, way):
    """By torchrun, without warm starts, and on a spare that is promoted."""
    pytest.importorskip("torch")
    runs = Runs(rig, way)
    expected = runs.alone("python", "-u")
    torchrun = runs.alone("torchrun", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    assert _differences(expected, torchrun) == {}
    off = runs.start("off", 0, "--ft-warm=off")
    runs.came(off, 0)
    rig.open("end0")
    assert off.wait(BOUND_S) == 0
    for name in ("torchelastic_*", "torchinductor_*"):  # torchrun and the script leave them
        for path in (rig.dir / "tmp").glob(name):
            shutil.rmtree(path)
    was_forked, facts = runs.facts("off", 0)
    assert not was_forked and _differences(expected, facts) == {}


@pytest.mark.torch
@EACH_WAY
def test_facts_on_a_promoted_spare(rig, way):
    """It is warm with what the lost node's ranks have told."""
    pytest.importorskip("torch")
    rig.before = OFTEN
    runs = Runs(rig, way)
    expected = runs.alone("python", "-u")
    place = (
        "--nnodes=1:2",
        f"--rdzv-endpoint=127.0.0.1:{rig.port}",
        "--rdzv-conf=join_timeout=60,last_call_timeout=30",
    )
    nodes = [runs.start("spare", 1, *place, f"--node-rank={rank}") for rank in (0, 1)]
    active = says("came 0 ", *nodes, timeout_s=BOUND_S)
    (spare,) = [one for one in nodes if one is not active]
    pid = runs.came(active, 0)
    if way not in EXECUTED:
        spare.line(f"standbys have{re.escape(runs.settled(active, 0))}$", BOUND_S)
        told(rig, "spare  warm: ")
    kill(active, pid)
    runs.came(spare, 1)
    rig.open("end1")
    assert spare.wait(BOUND_S) == 0
    was_forked, facts = runs.facts("spare", 1)
    assert _differences(expected, facts) == {}
    assert was_forked or way in EXECUTED
