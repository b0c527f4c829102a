"""The line of `nvrx why` about the first cause: what the rank has said of it, and how it ended."""

from pathlib import Path

import pytest

from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.declared import plain, replace
from nvrx_slurm.types import FaultKind, RankFault
from nvrx_slurm.views.why import _in_words, _story

pytestmark = pytest.mark.fast

SP = "/opt/venv/lib/python3.11/site-packages"


def cause_line(code, text, error="", at=""):
    """Of a rank that ended with `code`, wrote `text`, and raised `error` in the file `at`."""
    kind = FaultKind.SIGNAL if code < 0 else FaultKind.EXIT
    frames = f'  File "{at or "/w/train.py"}", line 7, in step\n    go()\n'
    trace = f"Traceback (most recent call last):\n{frames}{error}\n" if error else ""
    message = error.partition("\n")[0] or ("SIGKILL" if code < 0 else "")
    fault = RankFault(kind, "n1", 1, 3, 1, 4711, code, message, trace)
    fault = replace(fault, finding=examine(fault, f"{text}\n{trace}".encode()))
    result = {"code": 1, "reason": headline(fault), "duration_s": 8.0, "first_cause": plain(fault), "summary": ""}
    lines = list(_in_words(_story(result, Path("/nowhere")), Path("4711/r0")))
    return lines[1].removeprefix("first cause: ")


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (255, "FATAL:   could not open image /images/pt.sif: no", "FATAL:   could not open image /images/pt.sif"),
        (1, "srun: error: Munge encode failed: no socket", "srun: error: Munge encode failed: no socket (exit code 1)"),
        (-9, "loading\nthe mesh has no cells", "SIGKILL; it last wrote: loading | the mesh has no cells"),
        (7, "", "exit code 7, without an exception"),
    ],
)
def test_an_end_without_an_exception_tells_what_was_printed(code, text, told):
    assert cause_line(code, text).startswith(told)


@pytest.mark.parametrize(
    ("error", "at", "told"),
    [
        ("ValueError: bad sample", "", "ValueError: bad sample"),
        (
            "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for w: copying a param",
            "",
            "size mismatch",
        ),
        (
            "BrokenPipeError: [Errno 32] Broken pipe",
            f"{SP}/wandb/sdk/sock.py",
            "(raised in wandb/sdk/sock.py:7 in step)",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error: invalid usage\nLast error:\nDuplicate GPU detected",
            "",
            "Duplicate GPU detected",
        ),
    ],
)
def test_an_exception_tells_what_it_is_about(error, at, told):
    line = cause_line(1, "", error, at)
    assert told in line and error.partition("\n")[0] in line
