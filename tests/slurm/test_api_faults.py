"""A pyslurm that dies, hangs or does not load, and a Slurm that does not answer: bounded, seldom asked, and told."""

import sys
from pathlib import Path

import pytest

from nvrx_slurm.slurm import api
from nvrx_slurm.slurm.api import tools as tools_module
from nvrx_slurm.slurm.api.by_pyslurm import PySlurm
from nvrx_slurm.slurm.api.facts import NoAnswer, NotKnown
from nvrx_slurm.slurm.api.tools import Tools, Turn
from nvrx_slurm.slurm.control import Control

pytestmark = pytest.mark.fast


# Stands in for pyslurm: each start is a line of `starts`; what `Nodes.load` does is in the file `does`.
PYSLURM = """
import sys, time
from pathlib import Path
here = Path(__file__).parent
with open(here / "starts", "a") as file:
    print("started", file=file)
__version__ = "25.11.2"
class PyslurmError(Exception): pass
class RPCError(PyslurmError): pass
def slurm_init(): pass
class Nodes:
    @staticmethod
    def load():
        exec((here / "does").read_text())
        return {}
"""


@pytest.fixture
def does(tmp_path, monkeypatch):
    """Puts the stand-in in the place of pyslurm and tells it what to do."""

    def to_do(what, module=PYSLURM):
        (tmp_path / "pyslurm").mkdir(exist_ok=True)
        (tmp_path / "pyslurm" / "__init__.py").write_text(module)
        (tmp_path / "pyslurm" / "does").write_text(what)
        return tmp_path / "pyslurm" / "starts"

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[2]}")
    yield to_do
    sys.modules.pop("pyslurm", None)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "does not say why"),
        ("time.sleep(600)", "did not answer within"),
        ("print('x' * 70000, file=sys.stderr); sys.exit('too much')", "too much"),
    ],
)
def test_a_process_that_dies_or_hangs_is_started_again(does, monkeypatch, what, says):
    monkeypatch.setattr(tools_module, "_FIRST_PAUSE_S", 0.0)
    starts = does(what)
    slurm = PySlurm(Tools(timeout_s=2.0))
    with pytest.raises(NoAnswer, match=says):
        slurm.nodes()
    assert slurm._child is None
    does("")
    slurm.tools.timeout_s = 30.0
    assert slurm.nodes() == slurm.nodes() == {}
    child = slurm._child
    assert child is not None and child.stdin is not None and len(starts.read_text().splitlines()) == 2
    child.stdin.close()  # as at the end of this process
    assert child.wait(30.0) == 0
    slurm.close()


def test_a_pyslurm_that_was_asked_for_and_does_not_load(does, tmp_path):
    """A command ends with 2; an agent goes on."""
    does("", "raise ImportError('libslurm.so.44 is missing')")
    with pytest.raises(api.NotUsable, match=r"libslurm\.so\.44") as raised:
        api.connect("pyslurm")
    assert raised.value.exit_code == 2
    control = Control("pyslurm")
    assert control.time_left_s(7, {}) is None
    assert control.node_address("localhost") == "localhost"
    with pytest.raises(api.NotUsable):
        control.batch_host(7)


def test_calls_pause_longer_and_longer_until_slurm_answers(monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(tools_module.time, "monotonic", lambda: now_s[0])
    turn, asked = Turn(), list[float]()

    def ask(error=NoAnswer):
        try:
            with turn.take(1.0):
                asked.append(now_s[0])
                if error is not None:
                    raise error("no")
        except (NoAnswer, NotKnown):
            pass

    for _ in range(400):
        ask()
        now_s[0] += 0.5
    gaps = [later - before for before, later in zip(asked, asked[1:], strict=False)]
    assert gaps == [1, 2, 4, 8, 16, 32, 60, 60]
    now_s[0] += 60
    ask(NotKnown)  # a refusal is an answer
    ask()
    now_s[0] += 1
    count = len(asked)
    ask(None)
    assert len(asked) == count + 1
