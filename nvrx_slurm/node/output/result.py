"""The end of a job, as the coordinator's node prints it and writes it to result.json."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.account.figures import lost_s, lost_steps, to_json
from nvrx_slurm.core.attribution.raised import failing_line
from nvrx_slurm.core.attribution.said import headline, report, what_to_do
from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.core.coordinator.events import HangFound, JobOver
from nvrx_slurm.core.words import in_words, utc
from nvrx_slurm.declared import plain, replace
from nvrx_slurm.node.output.faults import signal_name
from nvrx_slurm.system.files import IN_PROCESS_NAME, write_atomic
from nvrx_slurm.system.foreign import last_bytes

_ROWS_SHOWN = 32
_NOTES_BYTES = 1 << 20
_NOTES_LISTED = 1000
_COLUMNS = "{:>9} {:>6} {:>6}  {:<20} {}"


def write_result(path: Path, data: dict[str, Any]) -> None:
    """result.json: `data`, and the restarts in process, which the wrapper has noted in the log tree. In a thread."""
    _write(path, data)  # first: the notes are many files, and of ranks
    notes = _in_process_restarts(path.parent)
    data["inprocess_restarts"] = notes
    if notes:
        told = f"restarts in process: {len(notes)}"
        data["summary"] = f"{data['summary']}, {told}" if data["summary"] else told
    _write(path, data)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(content, indent=1) + "\n").encode())


def _in_process_restarts(run: Path) -> list[dict[str, Any]]:
    """The last notes of wrappers, oldest first."""
    notes = run.glob(f"cycle_*/{IN_PROCESS_NAME}")
    files = sorted(notes, key=lambda file: (len(file.parent.name), file))  # 9 before 10
    lines = [line for file in files for line in last_bytes(file, _NOTES_BYTES).splitlines()]
    found = []
    for line in lines[-_NOTES_LISTED:]:
        # A rank can write what it likes.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            note = parsed(line)
            cycle, iteration = int(note["cycle"]), int(note["iteration"])
            found.append({"cycle": cycle, "iteration": iteration, "why": str(note["why"])})
    return found


def write_hang(path: Path, command: HangFound) -> None:
    """`cycle_<c>/hang.json`: the verdict about a hang, and the evidence of all ranks (as types.RankEvidence).

    In a thread: it takes about a second for 10,000 ranks.
    """
    content = plain(command) | {"culprits": [culprit.rank for culprit in command.culprits]}
    path.parent.mkdir(exist_ok=True)
    _write(path, content)


def sentence(done: JobOver) -> str:
    """The last lines of the console: code, reason and history; then the failed ranks and the first cause."""
    reason = done.reason
    cause = done.cause
    job = done.report
    if cause is not None:  # it is told in full below
        reason = reason.replace(headline(cause), "").strip(";: ") or cause.kind.value
    told = history(done)
    link = "" if not told else " after " if done.code == 0 else "; "
    lines = [f"job ends with code {done.code}: {reason}{link}{told} ({in_words(job.duration_s)} in all)"]
    if done.code != 0 and len(job.last_faults) > 1:
        lines += failure_table(job.last_faults, -1 if cause is None else cause.rank)
    if cause is not None:
        lines.append(report(cause))
    return "\n".join(lines)


def history(done: JobOver) -> str:
    """What the job went through, for example "2 restarts, 1 lost node, 11 steps and 9.3 s lost, 84.1 % productive"; ""
    if nothing happened."""
    job = done.report
    restarted = {restart.cycle for restart in job.restarts}
    last = job.last_faults if done.code != 0 else ()
    counts = {
        "restart": max(job.restarts_used, len(job.restarts)),  # a port that was taken uses none
        "survived fault": sum(fault.cycle not in restarted and fault not in last for fault in job.faults),
        "lost node": len(job.lost_nodes),
        "excluded node": len(job.excluded_nodes),
        "used spare": len(job.spares_used),
    }
    told = [f"{number} {what}{'s' if number > 1 else ''}" for what, number in counts.items() if number]
    return ", ".join([*told, *([lost_in_words(job.restarts, job.account)] if job.restarts else [])])


def lost_in_words(restarts: Sequence[t.RestartRecord], account: t.Account | None) -> str:
    """What restarts have cost. "at least": it is not known how much work was repeated."""
    steps = [steps for restart in restarts if (steps := lost_steps(restart)) is not None]
    some = f"{sum(steps)} step{'s' if sum(steps) != 1 else ''} and " if steps else ""
    least = "at least " if account is not None and "recomputed" in account.estimated else ""
    told = f"{some}{least}{in_words(sum(map(lost_s, restarts)))} lost"
    if account is None or account.wall_s <= 0.0:
        return told
    return f"{told}, {100 * account.productive_s / account.wall_s:.1f} % productive"


def failure_table(faults: Sequence[t.FaultRecord], culprit: int) -> list[str]:
    """One line per failed rank, or (rank "-") node: when, where and with which exit code or signal it ended.

    A victim is marked: its error only follows from that of the `culprit`, a rank.
    """
    from nvrx_slurm.core.attribution.rules import named  # not at the start

    lines = [f"failed in cycle {faults[0].cycle}:"]
    lines.append(_COLUMNS.format("time", "rank", "local", "node", "ended by"))
    for fault in faults[:_ROWS_SHOWN]:
        is_rank = fault.rank >= 0
        how = _ended_by(fault)
        rule = named(fault.rule)
        if rule is not None and rule.role is t.LineRole.ECHO and fault.rank != culprit:
            how += f", a victim ({fault.rule})"
        cells = (
            f"+{fault.at_s:.2f}s",
            fault.rank if is_rank else "-",
            fault.local_rank if is_rank else "-",
            f"{fault.infra_rank} ({fault.host})",
            how,
        )
        lines.append(_COLUMNS.format(*cells))
    more = len(faults) - _ROWS_SHOWN
    if more > 0:
        lines.append(f"  and {more} more, see result.json")
    return lines


def _ended_by(fault: t.FaultRecord) -> str:
    code = fault.exit_code
    how = signal_name(-code) if code < 0 else f"code {code}"
    if fault.kind in (t.FaultKind.EXIT, t.FaultKind.SIGNAL):
        return how
    return f"{fault.kind.value} ({how})" if code else fault.kind.value


def content(done: JobOver, requeues: int | None, allocation: tuple[float, float] | None = None) -> dict[str, Any]:
    """The content of result.json, now that the job ends; `at_s` counts from the beginning of the job.

    `requeues`: how often Slurm has restarted the job; None without Slurm. `allocation`: when the job was submitted and
    started (Unix seconds).
    """
    account, now = done.report.account, time.time()
    cause, job = done.cause, plain(replace(done.report, account=None))
    began = now - done.report.duration_s
    submitted, started = allocation or (None, began)
    queue_s = None if submitted is None else max(0.0, started - submitted)
    for entry in (*job["faults"], *job["restarts"], *job["last_faults"], *job["stragglers"]):
        entry["time"] = utc(began + entry["at_s"])
    return {
        "code": done.code,
        "reason": done.reason,
        "slurm_restart_count": requeues,
        "first_cause": None if cause is None else plain(cause) | _told(cause),
        "started": utc(began),
        "ended": utc(now),
        "summary": history(done),
        **job,
        "account": None if account is None else to_json(account, queue_s, max(0.0, began - started)),
    }


def _told(cause: t.RankFault) -> dict[str, str]:
    from nvrx_slurm.core.attribution.rules import topic  # not at the start

    return {"line": failing_line(cause.traceback), "class": topic(cause), "what_to_do": what_to_do(cause, of_site=True)}
