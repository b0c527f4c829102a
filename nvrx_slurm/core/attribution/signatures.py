"""What known failures print, as a table; docs/reference/attribution.md explains it and shows it.

The texts are those of PyTorch, NCCL, Gloo, CUDA, Slurm, Linux and Python, as their sources and public reports show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nvrx_slurm.types import Blame, Confidence, LineRole, Remedy


class Signature(NamedTuple):
    """One known failure. It matches a line that holds one of its texts, and its pattern where it has one."""

    name: str
    texts: tuple[str, ...]  # lower case; the line is compared in lower case
    role: LineRole
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    pattern: str  # of the lower-case line; "" = the texts are enough
    one_node: bool  # on the ranks of one node only: that node is to blame


# [role, to blame, confidence, remedy, perhaps one-node], then one row for each signature with these:
# name: texts between semicolons ~ pattern. A row goes on in the next line if that is indented.
_TABLE = r"""
[cause node certain elsewhere]
gpu-ecc: uncorrectable ecc error encountered
gpu-peer-memory: invalid access of peer gpu memory
gpu-xid: nvrm: xid ~ xid \([^)]*\): (48|61|62|64|74|79|95|109|110|119|120|136|140|143|155|156|158)\b
nvswitch-fatal: sxid; nvlink ~ (sxid|nvlink).{0,200}(?<!no[nt][ -])\bfatal|nvlink.{0,200}recovery failed
nic-health: health compromised - reached miss count; unrecoverable hardware error
[cause node likely elsewhere]
gpu-not-initialized: system not yet initialized
gpu-missing: no cuda-capable device is detected; no cuda gpus are available
gpu-busy: all cuda-capable devices are busy or unavailable
gpu-driver: driver/library version mismatch; cuda driver version is insufficient
pcie-fatal: aer: ~ aer:.{0,200}uncorrected \(fatal\)|uncorrected \(fatal\).{0,200}aer:
machine-check: mce: [hardware error]; edac; thermal shutdown ~ error\](?!.*(\bcorrected|logged))|edac.*\bue\b|thermal
kernel-lockup: soft lockup; rcu_sched self-detected stall; kernel panic
local-disk: i/o error, dev nvme; remounting filesystem read-only
host-out-of-memory: out of memory: killed process ~ (?<!cgroup )out of memory: killed process
slurm-memory-error: uncorrectable memory error at
slurm-stepd-stuck: not ending with signals
slurm-node-failure: due to node failure; node failure on
[unclear user guess restart]
gpu-xid-application: nvrm: xid
data-loader-worker: dataloader worker ~ exited unexpectedly|killed by signal
not-finite: loss is nan; loss is inf; nan loss; non-finite; nan or inf
illegal-access: illegal memory access; misaligned address; unspecified launch failure
[cause user certain stop one-node]
python-import: modulenotfounderror:; syntaxerror:; indentationerror:
[cause user likely restart one-node]
python-import-error: importerror:
shared-library: cannot open shared object file; ' not found (required by
file-missing: filenotfounderror:; no such file or directory
permission: permissionerror:; permission denied
disk-full: no space left on device; disk quota exceeded
no-interface: no socket interface found; unable to find address for
port-taken: eaddrinuse; address already in use; failed to bind
[cause user certain stop]
arguments: unrecognized arguments; the following arguments are required
checkpoint-mismatch: size mismatch for; missing key(s) in state_dict; unexpected key(s) in state_dict
[cause user likely stop]
settings: invalid option; invalid config
duplicate-gpu: duplicate gpu detected; ncclinvalidusage
[cause user likely restart]
gpu-out-of-memory: cuda out of memory; outofmemoryerror; cublas_status_alloc_failed
cgroup-out-of-memory: oom_kill event; oom killed; memory cgroup out of memory; exceeded memory limit
data-loader-memory: is killed by signal: bus error; insufficient shared memory
device-assert: device-side assert triggered
collective-mismatch: op.preamble.length <= op.nbytes; collective mismatch; detected mismatch between collectives
[unclear unknown guess restart]
cuda-library: cudnn_status_; cublas_status_; cuda error: unknown error
native-crash: segmentation fault; fatal python error: segmentation; fatal python error: bus;
    fatal python error: illegal; core dumped
nccl-internal: unhandled system error; unhandled cuda error; ncclinternalerror; ncclsystemerror
[unclear node guess restart]
watchdog-stuck: heartbeat monitor ~ heartbeat.{0,200}(timed out|stuck)|heartbeat_timeout
[cause storage likely restart]
checkpoint-torn: pytorchstreamreader failed; failed finding central directory; unpicklingerror; ran out of input
[cause storage likely restart one-node]
storage-error: input/output error; stale file handle; transport endpoint is not connected;
    cannot send after transport endpoint shutdown; read-only file system
storage-away: this client was evicted by; lustreerror; nfs: server ~ evicted|lustreerror|not responding
[unclear storage guess restart]
blocked-task: blocked for more than
[cause service likely restart]
service-away: max retries exceeded; readtimeouterror; 503 server error; 502 server error; 504 server error;
    500 server error
[cause network likely restart]
ib-retry-exceeded: got completion from peer ~ status=(12|13)\b
ib-port: got async event; got non-fatal async event ~ port error|port_err|link down
ib-fatal: got fatal async event; call to ibv_ ~ fatal async event|ibv_\w+ failed
[echo unknown likely none]
ib-flushed: got completion from peer ~ status=5\b
collective-timeout: watchdog caught collective operation timeout
watchdog-status: failure detected by watchdog at work sequence id
dump-signal: to signal dumping; observed flight recorder dump signal
watchdog-abort: some nccl operations have failed or timed out; taking the entire process down;
    watchdog thread terminated with exception
nccl-remote: ncclremoteerror; remote process exited or there was a network error; connection closed by remote peer
gloo-peer: connection closed by peer; connection reset by peer; broken pipe; software caused connection abort
gloo-timeout: timed out waiting
store-gone: connectfullmesh failed; diststoreerror; client socket has timed out; failed to recv, got 0 bytes;
    failed to recv, got
connect-refused: connection refused; socketstartconnect; socketprogress
nccl-after-error: previous error during capture; nccl warn cuda failure
inprocess: rankdiscarded:; storelost:; internalerror: ~ (^|inproc\S*\.)(rankdiscarded|storelost|(?<=n\.)internalerror):
stopped: signalexception; got signal: 15; sigterm
distributed-error: torch.distributed.dist
[cause network likely restart one-node]
no-route: no route to host; network is unreachable
[cause unknown likely restart]
monitored-barrier: failed to pass monitoredbarrier
[cause slurm certain none]
slurm-time-limit: due to time limit
slurm-preempted: due to preemption; job requeue
slurm-cancelled: cancelled at ~ cancelled at (?!.{0,100}due to node failure)
[cause user likely stop one-node]
container: couldn't start container; execve():
"""


def _signatures() -> Iterator[Signature]:
    for row in _TABLE.strip().replace("\n    ", " ").splitlines():
        if row.startswith("["):
            role, blame, confidence, remedy, *more = row.strip("[]").split()
            continue
        name, _, rest = row.partition(": ")
        texts, _, pattern = rest.partition(" ~ ")
        known = LineRole(role), Blame(blame), Confidence(confidence), Remedy(remedy)
        yield Signature(name, tuple(texts.strip().split("; ")), *known, pattern, "one-node" in more)


SIGNATURES = tuple(_signatures())
ADVICE = ("asynchronously reported", "cuda_launch_blocking", "torch_use_cuda_dsa", "may be caused by", "to debug")
RETRIED = re.compile(rb"\bretrying\b|\bretry in\b|\bsucceeded\b|\battempt \d+ ?(/|of) ?\d+")
PROGRESS = re.compile(rb"^(?! ).*\b(step|iter|iteration|epoch|loss)\b\W{0,3}\d", re.MULTILINE)
