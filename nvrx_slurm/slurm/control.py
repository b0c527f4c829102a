"""The only place that asks Slurm itself: its command line tools, with bounded waits and tolerant parsing.

Everything here works on 22.05 and later without `scontrol --json` (absent in 22.05, of changing shape since). Each
call is one RPC to slurmctld at most: callers ask seldom, never in a loop without back-off.

The seam for pyslurm (an optional extra): all knowledge of *how* Slurm is asked is in `_ask`'s callers below. A pyslurm
backend would answer the same four functions, in a child process (its import can end the process, and it changes
dlopen flags) with PYSLURM_DISABLE_AUTO_INIT set. Callers see no difference.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.system.bounded_process import through_trampoline

TIMEOUT_S = 10.0  # of one tool; Slurm's own MessageTimeout is 10 s by default
_DURATION = re.compile(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,2})", re.ASCII)
_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=", re.ASCII)
# Short forms behind a state (sinfo(1), "NODE STATE CODES").
_MARKS = {"*": "NOT_RESPONDING", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "$": "MAINTENANCE"}
# State words after which a node's processes of a job are certainly gone (scontrol(1), "NODE STATES").
_GONE = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})


def node_address(name: str) -> str:
    """Where other nodes reach node `name`: the name itself if it resolves, else Slurm's NodeAddr for it.

    Raises UsageError when neither gives an address. Blocks for the resolver plus at most 10 s.
    """
    if _resolves(name):
        return name
    answer = _ask(["scontrol", "show", "node", name, "-o"])
    address = parse_fields(answer or "").get("NodeAddr", "")
    if address and address != name and _resolves(address):
        return address
    raise UsageError(
        f"node {name}: its name does not resolve and Slurm knows no usable NodeAddr for it; "
        "add it to DNS or /etc/hosts, or set NodeAddr in slurm.conf."
    )


def time_left_s(job_id: int, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> float | None:
    """Seconds until Slurm ends the job (>= 0; inf: it has no limit); None if unknown.

    env: where SLURM_JOB_END_TIME is looked up (23.02 and later set it; the limit may have been changed since);
    default os.environ. Before 23.02 squeue(1) "%L" is asked.
    """
    text = (os.environ if env is None else env).get("SLURM_JOB_END_TIME", "")
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 33:
        return max(0.0, int(text) - time.time())
    return parse_time_left(_ask(["squeue", "-h", "-j", str(job_id), "-o", "%L"], timeout_s) or "")


def kill_wait_s() -> float:
    """Seconds Slurm leaves between SIGTERM and SIGKILL (KillWait); 30, its default, if unknown."""
    return parse_kill_wait(configuration())


def node_states(names: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, frozenset[str]] | None:
    """Slurm's state words per node, upper case without marks: {"n1": {"IDLE", "DRAIN"}}; None if unknown.

    Nodes that Slurm does not know are left out. See `is_gone`.
    """
    answer = _ask(["scontrol", "show", "node", ",".join(names), "-o"], timeout_s)
    return None if answer is None else parse_node_states(answer)


def is_gone(states: frozenset[str]) -> bool:
    """Whether Slurm considers the node dead: then, as far as it knows, no process of a job runs there."""
    return bool(states & _GONE)


def job_nodes(job_id: int) -> list[str] | None:
    """The nodes that the job has now and that Slurm does not consider dead; None if unknown.

    A batch script's variables keep the nodes it began with, also after a `--no-kill` job has lost some.
    """
    answer = _ask(["scontrol", "show", "job", str(job_id), "-o"])
    listed = parse_fields(answer or "").get("NodeList", "")
    if not listed or listed == "(null)":
        return None
    nodes = nodelist.expand(listed)
    states = node_states(nodes) or {}
    return [node for node in nodes if not is_gone(states.get(node, frozenset()))]


class NoAnswer(OSError):
    """Slurm does not answer now; it may later."""


class Host(NamedTuple):
    """Where a node's slurmd listens, and Slurm's state words for the node."""

    address: str
    port: int  # 0 = unknown
    states: frozenset[str]


def batch_host(job_id: int) -> Host | None:
    """The node that runs the batch script of the job; None if there is no such job, or it has no batch script.

    Raises NoAnswer when Slurm does not answer.
    """
    if shutil.which("scontrol") is None:
        return None
    answer = _ask(["scontrol", "show", "job", str(job_id), "-o"])
    if answer is None and not configuration():
        raise NoAnswer("Slurm does not answer")
    job = parse_fields(answer or "")
    name = job.get("BatchHost", "")
    if not name or job.get("BatchFlag", "1") == "0":
        return None
    answer = _ask(["scontrol", "show", "node", name, "-o"])
    if answer is None:
        raise NoAnswer("Slurm does not answer")
    node = parse_fields(answer)
    port = node.get("Port", "")
    states = parse_node_states(answer).get(name, frozenset())
    return Host(node.get("NodeAddr") or name, int(port) if port.isdigit() else 0, states)


def cancel(job_id: int) -> bool:
    """scancel the job. False if Slurm refuses, or does not answer."""
    return _ask(["scancel", str(job_id)]) is not None


def configuration() -> str:
    """The text of `scontrol show config`; "" if Slurm does not answer."""
    return _ask(["scontrol", "show", "config"]) or ""


def step_id(job_id: int, step_name: str) -> str | None:
    """ "JOB.STEP" of the running step of `job_id` with that name (srun --job-name); None when there is none."""
    answer = _ask(["squeue", "--steps", "-h", "-j", str(job_id), "-o", "%i|%j"]) or ""
    steps = (line.strip().partition("|") for line in answer.splitlines())
    return next((step for step, _, name in steps if name == step_name), None)


def signal_step(job_id: int, step_name: str, signum: int) -> bool:
    """Have Slurm send `signum` to the tasks of the step of `job_id` that was named `step_name` (srun --job-name).

    False when there is no such step (any more) or Slurm does not answer. See scancel(1): unlike a signal to srun, which
    kills the step at once for SIGTERM, this delivers just the signal.
    """
    step = step_id(job_id, step_name)
    return step is not None and _ask(["scancel", f"--signal={signum}", step]) is not None


# --- parsers: tolerant, for every version's output ------------------------------------------------------------------


def parse_fields(line: str) -> dict[str, str]:
    """KEY=VALUE of one line of `scontrol show ... -o`; values may hold blanks. The first of equal keys counts."""
    keys = list(_KEY.finditer(line))
    ends = [*(key.start() for key in keys), len(line)][1:]
    fields: dict[str, str] = {}
    for key, end in zip(keys, ends, strict=True):
        fields.setdefault(key[1], line[key.end() : end].strip())
    return fields


def parse_node_states(text: str) -> dict[str, frozenset[str]]:
    """State words per node of `scontrol show node -o`: "IDLE+DRAIN", "DOWN*", "MIXED+CLOUD+NOT_RESPONDING"."""
    found: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        fields = parse_fields(line)
        words = re.findall(r"[A-Z_]+", fields.get("State", "").upper())
        if name := fields.get("NodeName"):
            marked = [word for mark, word in _MARKS.items() if mark in fields.get("State", "")]
            found[name] = frozenset(words + marked)
    return found


def parse_time_left(text: str) -> float | None:
    """Seconds in squeue's %L: "D-HH:MM:SS", "HH:MM:SS", "MM:SS", UNLIMITED (inf); None for NOT_SET, INVALID and others.

    Of several lines (a job array's) the first that tells a time counts.
    """
    for line in text.splitlines():
        if line.strip() == "UNLIMITED":
            return math.inf
        if found := _DURATION.fullmatch(line.strip()):
            days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return None


def parse_kill_wait(text: str) -> float:
    """Seconds in the line "KillWait = 30 sec" of `scontrol show config`; 30 when there is none."""
    found = re.search(r"^\s*KillWait\s*=\s*(\d{1,9})\b", text, re.MULTILINE | re.IGNORECASE)
    return float(found[1]) if found else 30.0  # slurm.conf(5), KillWait


# --- the edge -------------------------------------------------------------------------------------------------------


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # UnicodeError: a label too long for IDNA
        return False


def _ask(argv: list[str], timeout_s: float = TIMEOUT_S) -> str | None:
    """Standard output of one Slurm tool; None when it is missing, fails, or does not answer within `timeout_s`.

    The tool ends with the calling thread, because an agent that ends does not wait for it.
    """
    tool = shutil.which(argv[0])
    if tool is None:
        return None
    # The C locale and no user formats: SQUEUE_* and SLURM_TIME_FORMAT change the output of squeue and scontrol.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SLURM_TIME_FORMAT"))}
    try:
        done = subprocess.run(
            through_trampoline([tool, *argv[1:]]), env={**clean, "LC_ALL": "C"}, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
