"""Reads what Slurm's tools print, and makes words for them. Pure, and tolerant: 22.05 to 26.05 print different fields.

An unknown field or state says nothing. A missing field that is needed raises SlurmError with its name. Texts of users
may hold blanks, newlines and `Key=`. Of equal keys the first counts.
"""

from __future__ import annotations

import math
import re
from datetime import datetime

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.slurm.api.facts import (
    JobFacts,
    NoAnswer,
    NodeFacts,
    NotAllowed,
    NotKnown,
    SlurmError,
    StepFacts,
    Waits,
)

_DURATION = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", re.ASCII)
_REASON = re.compile(r"\sReason=(.*)", re.DOTALL)
_SET_BY = re.compile(r"\s\[([^\[\]@]*)@[^\[\]]*\]")  # who set it, and when
_SETTING = re.compile(r"^(\w+)(?:\[\d+\])?[ \t]*=[ \t]*(.*)$", re.MULTILINE)
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
# Short forms behind a state (sinfo(1), "NODE STATE CODES").
_MARKS = {"*": "NOT_RESPONDING", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "$": "MAINTENANCE"}
_MAX_DIGITS = 18
_NOTHING = frozenset({"", "(null)", "None", "N/A"})
# Slurm sets such a variable only for jobs of which this field has this. sbatch passes on those of the job that it is
# called in. `-c 8` alone may be TresPerTask=cpu=8.
_SET_WITH = {
    "SLURM_ARRAY_": ("ArrayJobId", ""),
    "SLURM_HET_": ("HetJobId", ""),
    "SLURM_RESTART_COUNT": ("Restarts", ""),
    "SLURM_GPUS_PER_TASK": ("TresPerTask", "gpu"),
    "SLURM_TRES_PER_TASK": ("TresPerTask", ""),
}
# What slurm_strerror(3) says, in words that no version has changed.
_KINDS: dict[type[SlurmError], str] = {
    NotKnown: r"invalid job id|invalid node name|job/step already completing or completed|"
    r"^(?:job|node|step)\b.{0,300}\b(?:not found|does not exist)\.?$",
    Waits: r"job is pending execution",
    NotAllowed: r"access/permission denied|access denied|permission denied|not permitted|invalid user id",
    NoAnswer: r"unable to contact|timed out|zero bytes|not responding|standby|connection (?:refused|failure|reset)|"
    r"temporarily|authentication|munge|communication|shutting down|busy",
}


def error(by: str, said: str) -> SlurmError:
    """The error for what `by` (a tool, or libslurm) says: one sentence with at most 200 characters of it."""
    text = (
        "".join(c if c.isprintable() else "?" for c in " ".join(said.split())[:200])
        or "it does not say why"
    )
    kind = next(
        (kind for kind, words in _KINDS.items() if re.search(words, text, re.I)), SlurmError
    )
    return kind(f"{by} failed: {text}")


def node_name(name: str) -> str:
    """`name`, if it names exactly one node: scontrol takes lists, and ALL for all nodes. Raises SlurmError."""
    if not _NODE_NAME.fullmatch(name) or name.upper() == "ALL":
        raise SlurmError(f"{name!r} is not the name of a node")
    return name


def records(text: str, first: str) -> list[str]:
    """Each record of `scontrol show ... -o`; all records begin with the field `first`."""
    starts = [found.start() for found in re.finditer(rf"^{first}=", text, re.MULTILINE)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=False)]


def job(text: str, job_id: int) -> JobFacts:
    """The job with this id in `scontrol show job ID -o`; of an array, whose id its last task has, the first record."""
    found = [_without_name(record) for record in records(text, "JobId")]
    if not found:
        raise SlurmError(f"Slurm's answer about job {job_id} has no field JobId: {text[:80]!r}")
    one = next((one for one in found if _field(one, "JobId") == str(job_id)), found[0])
    code, _, signum = _need(one, "ExitCode").partition(":")
    state = _need(one, "JobState").split(",")[0]
    started_s = _unix(_field(one, "StartTime")) if state != "PENDING" else 0
    return JobFacts(
        job_id=_number(_field(one, "JobId")),
        state=state,
        reason=_field(one, "Reason"),
        nodes=hosts(_field(one, "NodeList")),
        excluded=hosts(_field(one, "ExcNodeList")),
        restarts=_number(_field(one, "Restarts", "0")),
        requeue=_field(one, "Requeue", "0") == "1",
        partition=_field(one, "Partition"),
        qos=_field(one, "QOS"),
        reservation=_field(one, "Reservation"),
        num_nodes=_number(_field(one, "NumNodes", "0").partition("-")[0]),
        batch_host=_field(one, "BatchHost") if _field(one, "BatchFlag", "1") != "0" else "",
        time_left_s=_time_left_s(one) if state == "RUNNING" else None,
        exit_code=128 + _number(signum) if _number(signum) else _number(code),
        submitted_s=_unix(_field(one, "SubmitTime")),
        started_s=started_s,
        # not of an earlier life
        preempted=0 < started_s <= _unix(_field(one, "PreemptTime")),
        inherited=tuple(
            name
            for name, (field, part) in _SET_WITH.items()
            if (value := _field(one, field, "0")) in ("", "0") or part not in value
        ),
    )


def _without_name(job: str) -> str:
    """A job's name is any text: `Key=` in it is no field."""
    before, key, rest = job.partition(" JobName=")
    _, next_key, after = rest.partition(" UserId=")
    return f"{before}{key}{next_key}{after}" if next_key else job


def steps(text: str) -> list[StepFacts]:
    """The steps in `squeue --steps -h -o "%i|%j"`. A name may hold anything, so it comes last."""
    lines = (line.strip().partition("|") for line in text.splitlines())
    return [StepFacts(step_id, name) for step_id, bar, name in lines if bar]


def requeues(text: str, otherwise: str) -> bool:
    """Of a partition or a QOS in `scontrol show ... -o`. `otherwise`: the mode where it has none ("" = OFF)."""
    mode = _field(text, "PreemptMode")
    if otherwise and mode in ("", "OFF"):
        mode = otherwise
    return "REQUEUE" in mode.split(",")


def nodes(text: str) -> dict[str, NodeFacts]:
    """The nodes in `scontrol show node -o`: "IDLE+DRAIN", "DOWN*", "MIXED+CLOUD+NOT_RESPONDING"."""
    found: dict[str, NodeFacts] = {}
    for one in records(text, "NodeName"):
        name = _field(one, "NodeName")
        state = _field(one, "State")
        reason = _REASON.search(one)
        set_by = _SET_BY.search(reason[1]) if reason else None
        words = re.findall(r"[A-Z_]+", state.upper()) + [
            word for mark, word in _MARKS.items() if mark in state
        ]
        if not words:
            raise SlurmError(f"Slurm's answer about node {name} has no field State")
        found[name] = NodeFacts(
            name=name,
            states=frozenset(words),
            reason=reason[1][: set_by.start()] if reason and set_by else _field(one, "Reason"),
            reason_by=set_by[1] if set_by else "",
            address=_field(one, "NodeAddr"),
            port=_number(_field(one, "Port")),
            partitions=tuple(filter(None, _field(one, "Partitions").split(","))),
        )
    return found


def config(text: str) -> dict[str, str]:
    """`scontrol show config` by name. The values of Prolog[0], Prolog[1], ... are joined by blanks."""
    found: dict[str, str] = {}
    for name, value in _SETTING.findall(text):
        found[name] = f"{found.get(name, '')} {value.replace('(null)', '')}".strip()
    return found


def hosts(listed: str) -> tuple[str, ...]:
    """The nodes of a list such as "n[1-2]"; () for "". Raises SlurmError for one that is cut off."""
    try:
        return tuple(nodelist.expand(listed))
    except UsageError as wrong:
        raise SlurmError(f"Slurm's answer has a wrong {wrong}") from None


def seconds(text: str) -> float | None:
    """ "D-HH:MM:SS", "HH:MM:SS", "MM:SS", UNLIMITED (inf); None for anything else."""
    if text == "UNLIMITED":
        return math.inf
    if not (found := _DURATION.fullmatch(text)):
        return None
    days, hours, minutes, rest = (int(number or 0) for number in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _unix(text: str) -> int:
    """The Unix time of a local time, as Slurm prints it; 0 for any other text."""
    try:
        return int(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return 0


def _time_left_s(job: str) -> float | None:
    limit_s = seconds(_field(job, "TimeLimit"))
    run_s = seconds(_field(job, "RunTime"))
    return None if limit_s is None or run_s is None else max(0.0, limit_s - run_s)


def _need(job: str, name: str) -> str:
    if f" {name}=" not in job:
        raise SlurmError(f"Slurm's answer about job {_field(job, 'JobId')} has no field {name}")
    return _field(job, name)


def _field(record: str, name: str, otherwise: str = "") -> str:
    """The value, which has no blanks, of the first field `name`; "" where Slurm prints a word for nothing."""
    _, found, rest = f" {record}".partition(f" {name}=")
    value = rest.split(maxsplit=1)[0] if found and rest[:1].strip() else ""
    return otherwise if not found else "" if value in _NOTHING else value


def _number(text: str) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else 0
