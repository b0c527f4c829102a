"""A dead worker's fault: from its exit code, torchelastic's error file and its stderr; its log where disks are full."""

import errno
import json
import os

import pytest

from nvrx_slurm.core.attribution.raised import failing_line
from nvrx_slurm.core.logs.lines import Lines
from nvrx_slurm.declared import replace
from nvrx_slurm.logs.rank_file import RankFile
from nvrx_slurm.node import run_dir
from nvrx_slurm.node.output import faults
from nvrx_slurm.types import FaultKind, RankFault

pytestmark = pytest.mark.process


WHERE = RankFault(FaultKind.SPAWN, "n1", 0, 3, 1)
RAISED = 'Traceback (most recent call last):\n  File "/w/train.py", line 7, in <module>\nValueError: bad\n'
DUMP = """Fatal Python error: Aborted

Thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/x.py", line 9 in all_reduce
  File "/w/train.py", line 16 in main

Extension modules: numpy (total: 1)
"""


@pytest.mark.parametrize(
    "code, found",
    [
        (0, None),
        (7, (FaultKind.EXIT, 7, "")),
        (-9, (FaultKind.SIGNAL, -9, "SIGKILL")),
        (-63, (FaultKind.SIGNAL, -63, "signal 63")),
    ],
)
def test_an_exit_code_is_a_fault(code, found):
    fault = faults.from_exit_code(code, WHERE)
    assert (fault and (fault.kind, fault.exit_code, fault.message)) == found


def error_file(message):
    return json.dumps({"message": message})


CONTEXT = """Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
[rank3]:[W302 10:11:13.1 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called
"""
LAUNCHER = """E0302 10:11:15.1 4600 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)
Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""
TORN = ("{", "[]", "[" * 5000, '{"message": 1}')
DETAILS = [
    ("", f"noise\n{RAISED}", "ValueError: bad", RAISED),
    ("", f"{RAISED}\nDuring:\n{RAISED.replace('bad', 'worse')}", "ValueError: worse", RAISED.replace("bad", "worse")),
    ("", "[rank1]: " + RAISED.replace("\n", "\n[rank1]: "), "ValueError: bad", RAISED),  # as torch prints it
    (error_file({"message": "E: told", "extraInfo": {"py_callstack": "stack"}}), RAISED, "E: told", "stack"),
    (error_file("plain"), "", "plain", ""),
    ("", RAISED + CONTEXT, "ValueError: bad", RAISED + CONTEXT.partition("\n[rank")[0] + "\n"),
    ("", RAISED + LAUNCHER, "ValueError: bad", RAISED),
    (
        "",
        "".join(f"2026-03-02 10:11:1{n},345 - {line}" for n, line in enumerate(RAISED.splitlines(True))),
        "ValueError: bad",
        RAISED,
    ),
    ("", "\x1b[31m" + RAISED.replace("\n", "\x1b[0m\n"), "ValueError: bad", RAISED),
    (error_file({"message": "E: told\nadvice", "extraInfo": {"py_callstack": RAISED}}), "", "E: told", RAISED),
    *((torn, RAISED, "ValueError: bad", RAISED) for torn in TORN),
    ("", "x" * 50_000, "", ""),
]


@pytest.mark.parametrize("error, stderr, message, traceback", DETAILS, ids=range(len(DETAILS)))
def test_details(tmp_path, error, stderr, message, traceback):
    (tmp_path / "error.json").write_text(error)
    (tmp_path / "err").write_text(stderr)
    found = faults.with_details(replace(WHERE, kind=FaultKind.EXIT), tmp_path / "error.json", tmp_path / "err")
    assert (found.kind, found.message, found.traceback) == (FaultKind.EXIT, message, traceback)


@pytest.mark.parametrize(
    "code, kind, message",
    [(126, FaultKind.SPAWN, "./p: Permission denied"), (127, FaultKind.SPAWN, "./p: Permission denied"),
     (2, FaultKind.EXIT, ""), (-11, FaultKind.SIGNAL, "SIGSEGV")],
)  # fmt: skip
def test_a_worker_that_cannot_be_started_is_another_fault(tmp_path, code, kind, message):
    (tmp_path / "err").write_text("nvrx-run: cannot start ./p: Permission denied\n")
    fault = faults.from_exit_code(code, WHERE)
    assert fault is not None
    found = faults.with_details(fault, tmp_path / "none", tmp_path / "err")
    assert (found.kind, found.message) == (kind, message)


def test_details_are_bounded_and_need_no_files(tmp_path):
    fault = RankFault(FaultKind.EXIT, "n1", 0, exit_code=1)
    without = faults.with_details(fault, tmp_path / "x", tmp_path / "y")
    assert replace(without, finding=None) == fault and without.finding is not None and not without.finding.rule
    (tmp_path / "x").write_text(error_file({"message": "m" * 9000, "extraInfo": {"py_callstack": "t" * 90_000}}))
    found = faults.with_details(fault, tmp_path / "x", tmp_path / "y")
    assert (len(found.message), len(found.traceback)) == (500, 16_000)


@pytest.mark.parametrize("dump", [DUMP, "noise\n" + DUMP.partition("\n\n")[2].partition("\nExt")[0]])
def test_of_a_hung_ranks_dump_only_the_stacks_are_kept(tmp_path, dump):
    """By faulthandler's fatal error, or on the monitor's own signal."""
    (tmp_path / "err").write_text(dump)
    hung = RankFault(FaultKind.HANG, "n1", 0, message="no heartbeat")
    found = faults.with_details(hung, tmp_path / "none", tmp_path / "err")
    assert found.traceback.startswith("Thread 0x2") and found.traceback.rstrip().endswith("line 16 in main")
    assert failing_line(found.traceback) == "/w/train.py:16"


OF_TORCH = '  File "/v/lib/python3.11/site-packages/torch/x.py", line 9, in f\n'


@pytest.mark.parametrize(
    "traceback, line",
    [
        ("", ""),
        ("no frames", ""),
        (RAISED, "/w/train.py:7"),
        (RAISED.replace("ValueError", OF_TORCH + "ValueError"), "/w/train.py:7"),
        (RAISED.replace("/w/train.py", "<frozen runpy>"), "<frozen runpy>:7"),  # better than nothing
        (RAISED.replace("line 7", "line 1") + "\nDuring:\n" + RAISED, "/w/train.py:7"),
        ("  + Exception Group " + RAISED.replace("  File", "  |   File"), "/w/train.py:7"),
        (DUMP, "/w/train.py:16"),
    ],
    ids=range(8),
)
def test_the_failing_line_is_the_innermost_of_the_user(traceback, line):
    assert failing_line(traceback) == line


def test_the_nodes_own_name_in_its_kernels_log_is_this_node(tmp_path):
    """Slurm may have another name for it."""
    kernel = "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus"
    killed = replace(WHERE, kind=FaultKind.SIGNAL, exit_code=-9, message="SIGKILL")
    for name, node in ((os.uname().nodename, "n1"), ("n7", "n7")):
        (tmp_path / "rank.err").write_text(f"Mar  1 10:00:00 {name} {kernel}\n")
        found = faults.with_details(killed, tmp_path / "none", tmp_path / "rank.err").finding
        assert found is not None and (found.rule, found.node) == ("gpu-xid", node)


def test_a_log_is_appended_to(tmp_path):
    path = tmp_path / "cycle_0" / "rank_0.out"
    for number in range(2):
        file, problem = run_dir.open_log(path)
        with file:
            assert (problem, file.tell()) == ("", 2 * number)
            os.write(file.fileno(), b"x\n")
    assert path.read_bytes() == b"x\nx\n"


def test_who_reads_a_log_while_it_is_tried_sees_no_line(tmp_path, monkeypatch):
    """A shipper that took the byte would skip the first one of the rank."""
    seen = []
    truncate = os.ftruncate

    def read_first(fd, size):
        one = RankFile(tmp_path / "rank_0.out", Lines())
        seen.append((one.read(False)[0], one.at))
        one.close()
        truncate(fd, size)

    monkeypatch.setattr(os, "ftruncate", read_first)
    run_dir.open_log(tmp_path / "rank_0.out")[0].close()
    assert seen == [(b"", 0)]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_a_log_that_takes_no_byte_is_dev_null(tmp_path, number, monkeypatch):
    """A used-up quota is not in statvfs(2): the file can be opened, and statvfs tells of free blocks."""

    def write(fd, data):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        file, problem = run_dir.open_log(tmp_path / "rank_0.out")
    with file:
        assert (file.name, problem) == (os.devnull, os.strerror(number))


def test_lack_of_descriptors_is_not_the_logs_fault(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="too many"):
        run_dir.open_log(tmp_path / "rank_0.out")
