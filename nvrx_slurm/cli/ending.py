"""What is known of a job when its step has ended: its result is completed by what Slurm and the agents' logs tell."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from nvrx_slurm.core.chain import Outside, ended_from_outside
from nvrx_slurm.core.words import utc
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.control import Control
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import last_bytes
from nvrx_slurm.views.log_tree import result_of

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# of the agents' logs, for the reason of an end without a coordinator
_LOGS_READ, _TAIL_BYTES = 8, 4096


def complete_result(
    control: Control,
    slurm: SlurmContext,
    directory: RunDir,
    code: int,
    began_s: float,
    say: Callable[[str], None],
) -> Outside | None:
    """Add what ended a job that got a signal, and return it. Without a coordinator write the result itself."""
    found, now_s = result_of(directory.path), time.time()
    outside = None
    result = found or {
        "code": code,
        "reason": f"no coordinator has told the end; the agents said last: {_last_lines(directory)}",
        "duration_s": now_s - began_s,
        "ended": utc(now_s),
    }
    if code - 128 in ENDING and not result.get("out_of_time"):  # Slurm's signal tells no reason
        with suppress(SlurmError):
            job, preempted = control.slurm.job(slurm.job_id), control.slurm.preempted(slurm.job_id)
            requeued = job.restarts > slurm.restart_count
            outside = ended_from_outside(job.state, job.reason, requeued, preempted)
            result = {**result, "ended_by": outside.value}
    try:
        if result != found:
            write_atomic(directory.result, (json.dumps(result, indent=1) + "\n").encode())
    except OSError as error:
        say(f"cannot write {directory.result}: {error.strerror}")
    return outside


def _last_lines(directory: RunDir) -> str:
    """The last line of each agent's log, each once."""
    words = []
    for log in sorted((directory.path / "agents").glob("agent_*.log"))[:_LOGS_READ]:
        with suppress(OSError, IndexError):
            words.append(last_bytes(log, _TAIL_BYTES).decode(errors="replace").splitlines()[-1])
    return "; ".join(dict.fromkeys(words)) or "nothing"
