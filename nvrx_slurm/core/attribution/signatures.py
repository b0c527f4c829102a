"""What known failures print. One row per signature; docs/reference/attribution.md shows this table.

A signature matches a line that holds one of its texts, in any case, and its pattern where it has one. The texts are
those of PyTorch, NCCL, Gloo, CUDA, Slurm, Linux and Python, as their sources and public reports show them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nvrx_slurm.types import Blame, Confidence, Remedy, Role

_CAUSE, _UNCLEAR, _ECHO = Role.CAUSE, Role.UNCLEAR, Role.ECHO
_USER, _NODE, _NETWORK, _STORAGE = Blame.USER, Blame.NODE, Blame.NETWORK, Blame.STORAGE
_SERVICE, _SLURM, _UNKNOWN = Blame.SERVICE, Blame.SLURM, Blame.UNKNOWN
_CERTAIN, _LIKELY, _GUESS = Confidence.CERTAIN, Confidence.LIKELY, Confidence.GUESS
_RESTART, _ELSEWHERE, _STOP, _NONE = Remedy.RESTART, Remedy.ELSEWHERE, Remedy.STOP, Remedy.NONE


class Signature(NamedTuple):
    """One known failure."""

    name: str
    texts: tuple[str, ...]  # lower case
    role: Role
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    pattern: str = ""  # of the lower-case line, where a text alone is not enough
    one_node: bool = False  # on the ranks of one node only: that node is to blame


def _user(
    name: str, *texts: str, confidence: Confidence = _LIKELY, remedy: Remedy = _RESTART, **more: object
) -> Signature:
    return Signature(name, texts, _CAUSE, _USER, confidence, remedy, **more)  # type: ignore[arg-type]


def _bad_node(name: str, *texts: str, pattern: str = "") -> Signature:
    return Signature(name, texts, _CAUSE, _NODE, _CERTAIN, _ELSEWHERE, pattern)


def _cause(name: str, blame: Blame, *texts: str, pattern: str = "", one_node: bool = False) -> Signature:
    return Signature(name, texts, _CAUSE, blame, _LIKELY, _RESTART, pattern, one_node)


def _unclear(name: str, blame: Blame, *texts: str, pattern: str = "") -> Signature:
    return Signature(name, texts, _UNCLEAR, blame, _GUESS, _RESTART, pattern)


def _echo(name: str, *texts: str, pattern: str = "") -> Signature:
    return Signature(name, texts, _ECHO, _UNKNOWN, _LIKELY, _NONE, pattern)


def _slurm(name: str, *texts: str) -> Signature:
    return Signature(name, texts, _CAUSE, _SLURM, _CERTAIN, _NONE)


SIGNATURES = (
    # --- the node: GPU, driver, kernel ---------------------------------------------------------------------
    _bad_node("gpu-ecc", "uncorrectable ecc error encountered"),
    _bad_node("gpu-peer-memory", "invalid access of peer gpu memory"),
    _bad_node("gpu-not-initialized", "system not yet initialized"),
    _bad_node("gpu-missing", "no cuda-capable device is detected", "no cuda gpus are available"),
    _bad_node("gpu-busy", "all cuda-capable devices are busy or unavailable"),
    _bad_node("gpu-driver", "driver/library version mismatch", "cuda driver version is insufficient"),
    _bad_node(
        "gpu-xid",
        "nvrm: xid",
        pattern=r"xid[^:]*: *(48|61|62|63|64|74|79|92|94|95|109|110|119|120|121|136|140|143|155|156|158)\b",
    ),
    _unclear(
        "gpu-xid-application",
        _USER,
        "nvrm: xid",
    ),
    _bad_node("nvswitch-fatal", "sxid", "nvlink", pattern=r"(sxid.*fatal|nvlink.*(fatal|recovery failed))"),
    _bad_node("pcie-fatal", "aer:", pattern=r"aer:.*uncorrected \(fatal\)|uncorrected \(fatal\).*aer:"),
    _bad_node(
        "machine-check",
        "mce: [hardware error]",
        "edac",
        "thermal shutdown",
        pattern=r"hardware error|edac.*\bue\b|thermal shutdown",
    ),
    _bad_node("nic-health", "health compromised - reached miss count", "unrecoverable hardware error"),
    _bad_node("kernel-lockup", "soft lockup", "rcu_sched self-detected stall", "kernel panic"),
    _bad_node("local-disk", "i/o error, dev nvme", "remounting filesystem read-only"),
    _bad_node(
        "host-out-of-memory",
        "out of memory: killed process",
        pattern=r"^(?!.*memory cgroup).*out of memory: killed process",
    ),
    _bad_node("slurm-memory-error", "uncorrectable memory error at"),
    _bad_node("slurm-stepd-stuck", "not ending with signals"),
    _bad_node("slurm-node-failure", "due to node failure", "node failure on"),
    # --- the user's script, data and settings --------------------------------------------------------------
    _user(
        "python-import",
        "modulenotfounderror:",
        "syntaxerror:",
        "indentationerror:",
        remedy=_STOP,
        confidence=_CERTAIN,
        one_node=True,
    ),
    _user("python-import-error", "importerror:", one_node=True),
    _user(
        "arguments", "unrecognized arguments", "the following arguments are required", remedy=_STOP, confidence=_CERTAIN
    ),
    _user("settings", "invalid option", "invalid config", "missing key", remedy=_STOP),
    _user("shared-library", "cannot open shared object file", "' not found (required by", one_node=True),
    _user("file-missing", "filenotfounderror:", "no such file or directory", one_node=True),
    _user("permission", "permissionerror:", "permission denied", one_node=True),
    _user(
        "checkpoint-mismatch",
        "size mismatch for",
        "missing key(s) in state_dict",
        "unexpected key(s) in state_dict",
        remedy=_STOP,
        confidence=_CERTAIN,
    ),
    _user("gpu-out-of-memory", "cuda out of memory", "outofmemoryerror", "cublas_status_alloc_failed"),
    _user(
        "cgroup-out-of-memory", "oom_kill event", "oom killed", "memory cgroup out of memory", "exceeded memory limit"
    ),
    _user("data-loader-memory", "is killed by signal: bus error", "insufficient shared memory"),
    _unclear("data-loader-worker", _USER, "dataloader worker", pattern=r"exited unexpectedly|killed by signal"),
    _user("device-assert", "device-side assert triggered"),
    _user(
        "collective-mismatch",
        "op.preamble.length <= op.nbytes",
        "collective mismatch",
        "detected mismatch between collectives",
    ),
    _user("duplicate-gpu", "duplicate gpu detected", "ncclinvalidusage", remedy=_STOP),
    _unclear("not-finite", _USER, "loss is nan", "loss is inf", "nan loss", "non-finite", "nan or inf"),
    _user("disk-full", "no space left on device", "disk quota exceeded", one_node=True),
    # --- unclear: GPU or script ----------------------------------------------------------------------------
    _unclear("illegal-access", _USER, "illegal memory access", "misaligned address", "unspecified launch failure"),
    _unclear("cuda-library", _UNKNOWN, "cudnn_status_", "cublas_status_", "cuda error: unknown error"),
    _unclear(
        "native-crash",
        _UNKNOWN,
        "segmentation fault",
        "fatal python error: segmentation",
        "fatal python error: bus",
        "fatal python error: illegal",
        "core dumped",
    ),
    _unclear(
        "watchdog-stuck",
        _NODE,
        "heartbeat monitor",
        pattern=r"heartbeat.*(timed out|watchdog.*stuck)|heartbeat_timeout",
    ),
    _unclear(
        "nccl-internal",
        _UNKNOWN,
        "unhandled system error",
        "unhandled cuda error",
        "ncclinternalerror",
        "ncclsystemerror",
    ),
    # --- storage and services ------------------------------------------------------------------------------
    _cause(
        "checkpoint-torn",
        _STORAGE,
        "pytorchstreamreader failed",
        "failed finding central directory",
        "unpicklingerror",
        "ran out of input",
    ),
    _cause(
        "storage-error",
        _STORAGE,
        "input/output error",
        "stale file handle",
        "transport endpoint is not connected",
        "cannot send after transport endpoint shutdown",
        "read-only file system",
        one_node=True,
    ),
    _cause(
        "storage-away",
        _STORAGE,
        "this client was evicted by",
        "lustreerror",
        "nfs: server",
        pattern=r"evicted|lustreerror|not responding",
        one_node=True,
    ),
    _unclear("blocked-task", _STORAGE, "blocked for more than"),
    _cause(
        "service-away",
        _SERVICE,
        "max retries exceeded",
        "readtimeouterror",
        "503 server error",
        "502 server error",
        "504 server error",
        "500 server error",
    ),
    # --- the network ---------------------------------------------------------------------------------------
    _cause("ib-retry-exceeded", _NETWORK, "got completion from peer", pattern=r"status=(12|13)\b"),
    _echo("ib-flushed", "got completion from peer", pattern=r"status=5\b"),
    _cause(
        "ib-port", _NETWORK, "got async event", "got non-fatal async event", pattern=r"port error|port_err|link down"
    ),
    _cause("ib-fatal", _NETWORK, "got fatal async event", "call to ibv_", pattern=r"fatal async event|ibv_\w+ failed"),
    _cause("no-interface", _USER, "no socket interface found", "unable to find address for", one_node=True),
    _cause("no-route", _NETWORK, "no route to host", "network is unreachable", one_node=True),
    _cause("port-taken", _USER, "eaddrinuse", "address already in use", "failed to bind", one_node=True),
    # --- consequences of a fault elsewhere -----------------------------------------------------------------
    _echo("collective-timeout", "watchdog caught collective operation timeout"),
    _echo("watchdog-status", "failure detected by watchdog at work sequence id"),
    _echo("dump-signal", "to signal dumping", "observed flight recorder dump signal"),
    _echo(
        "watchdog-abort",
        "some nccl operations have failed or timed out",
        "taking the entire process down",
        "watchdog thread terminated with exception",
    ),
    _echo(
        "nccl-remote",
        "ncclremoteerror",
        "remote process exited or there was a network error",
        "connection closed by remote peer",
    ),
    _echo(
        "gloo-peer",
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "software caused connection abort",
    ),
    _echo("gloo-timeout", "timed out waiting"),
    _echo(
        "store-gone",
        "connectfullmesh failed",
        "diststoreerror",
        "client socket has timed out",
        "failed to recv, got 0 bytes",
        "failed to recv, got",
    ),
    _echo("connect-refused", "connection refused", "socketstartconnect", "socketprogress"),
    _echo("nccl-after-error", "previous error during capture", "nccl warn cuda failure"),
    _echo("stopped", "signalexception", "got signal: 15", "sigterm"),
    Signature("monitored-barrier", ("failed to pass monitoredbarrier",), _CAUSE, _UNKNOWN, _LIKELY, _RESTART),
    # --- Slurm ---------------------------------------------------------------------------------------------
    _slurm("slurm-time-limit", "due to time limit"),
    _slurm("slurm-preempted", "due to preemption", "job requeue"),
    _slurm("slurm-cancelled", "cancelled at"),
    Signature("container", ("couldn't start container", "execve():"), _CAUSE, _USER, _LIKELY, _STOP, one_node=True),
)
ADVICE = ("asynchronously reported", "cuda_launch_blocking", "torch_use_cuda_dsa", "may be caused by", "to debug")
RETRIED = re.compile(rb"\bretrying\b|\bretry in\b|\bsucceeded\b|\battempt \d+ ?(/|of) ?\d+")
PROGRESS = re.compile(rb"^(?! ).*\b(step|iter|iteration|epoch|loss)\b\W{0,3}\d", re.MULTILINE)
