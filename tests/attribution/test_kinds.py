# ruff: noqa: E501 - lines as programs print them
"""Kinds of texts that were misread once, each by texts of several projects: what counts is where a line stands.

The lines are synthetic: written after the sources of the projects, with other numbers, names and paths.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import Case, fault_of

from nvrx_slurm.core.attribution.verdict import JudgedCause, judge
from nvrx_slurm.types import Confidence, FaultKind, RankFault, Remedy

pytestmark = pytest.mark.fast

WHERE = RankFault(FaultKind.SPAWN, "n1", 1, 3, 1, 4711)
FRAME = 'File "/opt/v/lib/python3.11/site-packages/a/b.py", line 7, in f'

# A traceback whose beginning is cut off, behind the prefixes of launchers.
CUT = [
    (f"3:   {FRAME}\n3:     g()\n3: ValueError: the mesh has 8 devices, not 4", "python-exception"),
    (f"n07: [rank12]:   {FRAME}\nn07: [rank12]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "gpu-out-of-memory"),
    (f"(WorkerDict pid=812, ip=10.0.0.3)   {FRAME}\n(WorkerDict pid=812, ip=10.0.0.3) OSError: [Errno 116] Stale file handle: '/data/x'", "storage-error"),
    (f"2026-03-01 10:00:00,123 (worker_3) :   {FRAME}\n2026-03-01 10:00:00,124 (worker_3) : ImportError: cannot import name 'f' from 'g'", "python-import-error"),
    (f"  0%|     | 0/247 [00:00<?, ?it/s][rank2]: Traceback (most recent call last):\n[rank2]:   {FRAME}\n[rank2]: KeyError: 'a'", "python-exception"),
    (f"  0%|     | 0/247 [00:00<?, ?it/s]Traceback (most recent call last):\n  {FRAME}\nMemoryError", "python-memory-error"),
    (f"[n2:3]:  {FRAME}\n[n2:3]:torch.distributed.DistBackendError: NCCL error in: a.cpp:7, unhandled cuda error\n[n2:3]:Last error:\n[n2:3]:Cuda failure 802 'system not yet initialized'", "gpu-not-initialized"),
]  # fmt: skip
# An exception that cannot be read: what else tells of an error.
UNREAD = [
    (f"OSError: [Errno 116] Stale file handle\n\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n  {FRAME}\n    save()", "storage-error"),
    (f"HTTP Error 503: Service Unavailable\n[rank4]: Traceback (most recent call last):\n[rank4]:   {FRAME}", "service-status"),
    (f"COMET ERROR: the run will not be logged\nTraceback (most recent call last):\n  {FRAME}", "service-client"),
    (f"[n2:3]:OSError: [Errno 122] Disk quota exceeded\n[n2:4]:OSError: [Errno 122] Disk quota exceeded\nTraceback (most recent call last):\n  {FRAME}", "disk-full"),
    (f"  {FRAME}\nRuntimeErrorpred = model(x)  {FRAME}\n:\nExpected to have finished reduction", "python-exception"),
    (f"HTTP Error 503: Service Unavailable\n  {FRAME}\n    g()\nthat was the stack", "service-status"),
    (f"UserWarning: HTTP Error 503: Service Unavailable\nTraceback (most recent call last):\n  {FRAME}", "python-exception"),
]  # fmt: skip
# A watchdog or a handler of C++ quotes what ended it.
QUOTED = [
    ("[rank2]:[E1 ProcessGroupNCCL.cpp:9] [Rank 2] Process group watchdog thread terminated with exception: CUDA error: device-side assert triggered\nframe #0: a\nframe #1: b\nframe #2: c\nframe #3: d\nframe #4: e", "device-assert"),
    ("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: an illegal memory access was encountered\nframe #0: a\nframe #1: b\nframe #2: c\nframe #3: d\nframe #4: e", "illegal-access"),
    ("ProcessGroupXCCL watchdog thread terminated with exception: HIP error: out of memory\nframe #0: a\nframe #1: b\nframe #2: c\nframe #3: d\nframe #4: e", "gpu-out-of-memory"),
    ("NVRM: Xid (PCI:0000:9d:00): 45, pid=1, name=python, Ch 01 caused by previous Xid 145", "gpu-xid-nvlink-event"),
    ("NVRM: Xid (PCI:0000:9d:00): 45, pid=1, name=python, Ch 01, Preemptive Removal", "gpu-xid-application"),
]  # fmt: skip
# A connection that cannot be made is no lost peer; nor is one to the rank's own node a broken link.
UNMADE = [
    ("n3:1:2 [0] misc/socket.cc:9 NCCL WARN socketStartConnect: Connect to 10.0.0.9<4711> failed : Software caused connection abort", "connect-unmade"),
    ("btl_tcp_endpoint.c:9: connect() to 10.1.2.3:1024 failed: Cannot assign requested address (99)", "connect-unmade"),
    ("[1.0] [n1:7:0] sock.c:3 UCX ERROR connect(fd=5, dest_addr=10.0.0.9:31) failed: Operation not permitted", "connect-unmade"),
    ("NCCL WARN socketStartConnect: Connect to 169.254.3.1<4711> failed : Software caused connection abort", "connect-own-address"),
    ("NCCL WARN socketStartConnect: Connect to 127.0.0.1<4711> failed : Connection refused", "connect-refused"),
    ("NCCL WARN socketPollConnect: connect to 10.0.0.9<4711> returned Connection refused", "connect-refused"),
]  # fmt: skip
# Services tell by numbers, and by names of errors.
STATUS = [
    ("urllib.error.HTTPError: HTTP Error 502: Bad Gateway", "service-status"),
    ("RuntimeError: the registry returned status code 429", "service-status"),
    ("google.api_core.exceptions.ServiceUnavailable: 503 GET https://storage.googleapis.com/b", "service-status"),
    ("OSError: AWS Error SLOW_DOWN during PutObject operation: reduce", "service-bucket"),
    ("requests.exceptions.HTTPError: 403 Client Error: Forbidden for url: https://x/y", "no-access-status"),
    ("OSError: AWS Error ACCESS_DENIED during HeadObject operation: no answer", "no-access-bucket"),
    ("ValueError: the tokenizer has 503 status tokens", "python-exception"),
]  # fmt: skip
# Asserts of kernels, whichever the vendor; those of libc are a program's own.
ASSERTS = [
    ("/w/aten/native/hip/Indexing.hip:12: select: Device-side assertion `i < n' failed.", "device-assert-line"),
    ("/w/aten/native/musa/Indexing.mu:12: select: block: [0,0,0], thread: [1,0,0] Assertion `i < n` failed.", "device-assert-line"),
    ("unknown:0: unknown: block: [7,0,0], thread: [3,0,0] Assertion `index out of bounds: 0 <= tmp4 < 8` failed.", "device-assert-line"),
    ("python3: ../src/sched.c:101: run: Assertion `n > 0' failed.", ""),
]  # fmt: skip
# A bus error and a full /dev/shm.
SHARED = [
    ("  traceback : Signal 7 (SIGBUS) received by PID 14750", "bus-error"),
    ("/slurm/script: line 7: 4711 Bus error (core dumped) python train.py", "bus-error"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\nTraceback (most recent call last):\n  File \"/w/a.py\", line 7, in f\nOSError: [Errno 28] No space left on device", "data-loader-memory"),
    ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\nTraceback (most recent call last):\n  File \"/w/a.py\", line 7, in f\nOSError: [Errno 28] No space left on device: '/ckpt/a.pt'", "disk-full"),
]  # fmt: skip
# A lock of a file that others use, too.
LOCKS = [
    ("filelock._error.Timeout: The file lock '/root/.cache/x/a.lock' could not be acquired.", "file-lock"),
    ("sqlite3.OperationalError: database is locked", "file-lock"),
    ("[n1:7]:ValueError: Couldn't acquire lock on /.hf/exp-16-rdv.lock from process 7.", "file-lock"),
    ("E: Could not get lock /var/lib/dpkg/lock-frontend.lock", "file-lock"),
    ("RuntimeError: could not acquire lock for <_io.BufferedWriter name='<stderr>'> at interpreter shutdown", "python-exception"),
]  # fmt: skip
ALL = [*CUT, *UNREAD, *QUOTED, *UNMADE, *STATUS, *ASSERTS, *SHARED, *LOCKS]


def verdict_on(text: str, folder: Path, code: int = 1) -> JudgedCause:
    """The verdict on one rank of four nodes that wrote `text`."""
    if re.match(r"[\w.]+(Error|Timeout|Unavailable): .*$", text):
        text = f"Traceback (most recent call last):\n  {FRAME}\n{text}"
    case = Case("a", "", "x", ("user",), False, code, {"text": text}, ())
    verdict = judge([fault_of(case, (), WHERE, folder)], 4)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(("text", "rule"), ALL)
def test_a_kind_of_text_is_read_by_where_its_lines_stand(text: str, rule: str, tmp_path: Path) -> None:
    assert verdict_on(text, tmp_path).rule == rule


@pytest.mark.parametrize(("text", "rule"), UNREAD)
def test_what_stands_beside_an_exception_that_cannot_be_read_is_a_guess(text: str, rule: str, tmp_path: Path) -> None:
    assert verdict_on(text, tmp_path).confidence is Confidence.GUESS


def test_a_module_that_a_program_did_without_does_not_end_the_job(tmp_path: Path) -> None:
    text = "ModuleNotFoundError: No module named 'flash_attn'\n" + "going on without it\n" * 9
    found = verdict_on(text, tmp_path)
    assert found.confidence is Confidence.GUESS and found.remedy is Remedy.RESTART


def test_a_failure_that_several_nodes_share_is_none_of_theirs(tmp_path: Path) -> None:
    one = "srun: error: Task launch for StepId=881.0 failed on node {}: no answer\n"
    assert verdict_on(one.format("n7"), tmp_path).blame.value == "node"
    assert verdict_on(one.format("n7") + one.format("n8"), tmp_path).blame.value == "slurm"


def test_a_node_that_leaves_is_the_only_one_that_its_lines_name(tmp_path: Path) -> None:
    one = "2026-03-01T10:00:00+01:00 {} kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus\n"
    assert verdict_on(one.format("n1") * 2, tmp_path).confidence is Confidence.CERTAIN
    both = verdict_on(one.format("n1") + one.format("n8"), tmp_path)
    assert both.confidence is Confidence.GUESS and both.remedy is Remedy.RESTART
