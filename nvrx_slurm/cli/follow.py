"""`nvrx submit --wait`: shows the output of jobs that run one after the other, until the last one has ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.cli.log_tree import result_of
from nvrx_slurm.core.chain import FINAL
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import JobFacts, NoAnswer, NotKnown

_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
_FIRST_S, _LONGEST_S = 0.5, 15.0  # between two questions to Slurm, which forgets a job MinJobAge (300 s) after its end
_READ_S = 0.5
_END_S = 3.0  # from the result to Slurm's end of the job, which waits for a lost node
_CHUNK_BYTES = 1 << 20
_CANCELLED = 143


def follow(slurm: Slurm, jobs: Sequence[int], outputs: Sequence[Path], log_dir: Path, requeues: bool) -> int:
    """Copy each job's output file to stdout; the exit code of the last job that ran. Ctrl-C leaves the jobs alone.

    `requeues`: --until-done: only 0, 2 and 93 end the job.
    """
    code = int(ExitCode.FAILED)
    try:
        for job_id, output in zip(jobs, outputs, strict=True):
            found = _wait(slurm, job_id, output, log_dir, requeues)
            if found is None:
                print(f"nvrx: Slurm does not know job {job_id} any more", file=sys.stderr)
                return code
            if not found.nodes and found.state == "CANCELLED" and job_id != jobs[0]:
                return code  # the link before has ended the chain
            code = found.exit_code or (0 if found.state == "COMPLETED" else _CANCELLED)
    except KeyboardInterrupt:
        print(f"nvrx: not waiting any more; end the job with: scancel {' '.join(map(str, jobs))}", file=sys.stderr)
        return 130
    return code


def _wait(slurm: Slurm, job_id: int, output: Path, log_dir: Path, requeues: bool) -> JobFacts | None:
    """The job as it was in the end; None if Slurm has forgotten it."""
    shown, pause_s, ask_at, last, job, ended_s = 0, _FIRST_S, 0.0, "", None, math.inf
    while True:
        shown = _show(output, shown)
        if job is not None and math.isinf(ended_s):
            end = result_of(log_dir / str(job_id) / f"r{job.restarts}")
            if end.get("code", 128) < 128 and (not requeues or end["code"] in FINAL):
                # after a signal Slurm may requeue the job
                ended_s, ask_at = time.monotonic(), 0.0
        elif job is not None and time.monotonic() > ended_s + _END_S:  # as long as a dead node is not back
            _show(output, shown)
            return replace(job, state="COMPLETED", exit_code=end["code"])
        if time.monotonic() >= ask_at:
            try:
                job = slurm.job(job_id)
            except NotKnown:
                return None
            except NoAnswer:
                pass
            else:
                if job.state in _OVER:
                    _show(output, shown)
                    return job
                word = f"{job.state} ({job.reason})" if job.reason and job.state == "PENDING" else job.state
                if word != last:
                    print(f"nvrx: job {job_id} is {word}", file=sys.stderr, flush=True)
                last = word
            pause_s = min(_LONGEST_S, 1.5 * pause_s)
            ask_at = time.monotonic() + pause_s
        time.sleep(_READ_S)


def _show(path: Path, start: int) -> int:
    """Copy what has been added to the file since byte `start`; the byte up to which it is shown now."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            while data := file.read(_CHUNK_BYTES):
                sys.stdout.buffer.write(data)
                start += len(data)
    except OSError:
        return start  # Slurm has not made it yet, or the file system does not answer
    sys.stdout.buffer.flush()
    return start
