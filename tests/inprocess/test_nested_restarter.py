"""The lines a launcher's log reader looks for, and the logger they and the wrapper write to."""

import subprocess
import sys

import pytest
from ranks_harness import WITHOUT_TORCH

from nvrx_slurm.inprocess.plugins import nested_restarter as nested
from nvrx_slurm.inprocess.plugins.abort import Abort, AbortTorchDistributed
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.steps import Completion, Initialize, RetryController, Terminate
from nvrx_slurm.inprocess.state import State

pytestmark = pytest.mark.process


class Lines(nested.NestedRestarterLogger):
    def __init__(self):
        self.lines = []

    def log_for_restarter(self, message):
        self.lines.append(message.partition("[NestedRestarter] ")[2])


def state(rank=0):
    return State(rank=rank, world_size=4, active_rank=rank).freeze()


def test_a_run_with_two_faults_writes_the_whole_story():
    lines = Lines()
    completed = nested.NestedRestarterHandlingCompleted(logger=lines)
    starting = nested.NestedRestarterHandlingStarting(logger=lines)
    finalized, aborted = nested.NestedRestarterFinalized(logger=lines), nested.NestedRestarterAborted(logger=lines)
    initialize = Compose(completed, RetryController(max_iterations=10))
    abort = Compose(AbortTorchDistributed(), starting)
    assert isinstance(initialize, Initialize) and isinstance(abort, Abort)
    assert isinstance(finalized, Completion) and isinstance(aborted, Terminate)
    for step in (initialize, abort, initialize, abort, initialize, finalized, aborted):
        here = state()
        assert step(here) is here
    assert lines.lines == [
        "name=[InProcess] state=initialize",
        "name=[InProcess] state=handling stage=starting",
        "name=[InProcess] state=handling stage=completed",
        "name=[InProcess] state=handling stage=starting",
        "name=[InProcess] state=handling stage=completed",
        "name=[InProcess] state=finalized",
        "name=[InProcess] state=aborted",
    ]


def test_only_the_special_rank_writes():
    lines = Lines()
    callback = nested.NestedRestarterCallback("own", "stage", logger=lines, special_rank=2)
    for rank in range(4):
        callback(state(rank))
    assert lines.lines == ["name=[InProcess] state=own stage=stage"]


def written(code, **env):
    """Lines on stdout and stderr of a process that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


USE = """
import logging, os, sys
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
from nvrx_slurm.inprocess import log
from nvrx_slurm.inprocess.plugins import nested_restarter
from nvrx_slurm.inprocess.state import State
logger = logging.getLogger("nvrx_slurm.inprocess")
OWN
for _ in range(3):
    log.setup_logger()
logging.getLogger("nvrx_slurm.inprocess.plugins.abort").debug("a detail")
os.environ["RANK"] = "7"
logger.error("an error")
del os.environ["RANK"]
nested_restarter.NestedRestarterFinalized()(State(0, 1).freeze())
logging.getLogger("mine").info("of the user")
"""
LINE = "active_rank=None [NestedRestarter] name=[InProcess] state=finalized"


def test_messages_go_to_stderr_once_with_the_current_rank_and_not_to_the_root_logger():
    out, err = written(USE.replace("OWN", ""))
    assert out == ["INFO:mine:of the user"] and len(err) == 2
    assert "[INFO]" in err[1] and err[1].endswith(LINE) and all("[rank 7]" in line for line in err)


def test_the_level_and_the_handler_are_the_users():
    assert len(written(USE.replace("OWN", "logger.setLevel(logging.ERROR)"), NVRX_LOG_LEVEL="debug")[1]) == 1
    out, err = written(USE.replace("OWN", "logger.addHandler(logging.StreamHandler(sys.stdout))"))
    assert (out, err) == (["an error", LINE, "INFO:mine:of the user"], [])


def test_an_unknown_level_is_a_usage_error():
    with pytest.raises(subprocess.CalledProcessError) as failed:
        written(USE.replace("OWN", ""), NVRX_LOG_LEVEL="loud")
    assert "UsageError: NVRX_LOG_LEVEL=LOUD" in failed.value.stderr
