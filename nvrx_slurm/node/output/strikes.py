"""Nodes under suspicion, over jobs: `<log-dir>/strikes.jsonl`, one JSON object per strike. A hint for people.

A strike never excludes a node by itself. It counts for 28 days (Meta's lemon nodes, arXiv 2410.21680).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.system.foreign import last_bytes

KEPT_S = 28 * 86400.0
MANY = 3  # strikes after which people should look at a node
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK  # all users of the log directory write here
_NAME = "strikes.jsonl"
_MOST_BYTES = 1 << 20  # that are read, from the end: about 4,000 strikes
_WHY_CHARS = 300


def add(log_dir: Path, host: str, job: str, why: str) -> None:
    """Append a strike, in one write, which other jobs do not tear apart. Raises OSError."""
    entry = {"time": round(time.time()), "host": host, "job": job, "why": why[:_WHY_CHARS]}
    line = (json.dumps(entry) + "\n").encode()
    opened = os.open(log_dir / _NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | _CAREFUL, 0o666)
    try:
        os.write(opened, line)
    finally:
        os.close(opened)


def suspects(log_dir: Path) -> dict[str, int]:
    """Hosts with MANY strikes or more in the last 28 days, most first. What is no strike is passed over."""
    try:
        lines = last_bytes(log_dir / _NAME, _MOST_BYTES).splitlines()
    except OSError:
        return {}
    hosts, since = Counter[str](), time.time() - KEPT_S
    for line in lines:
        try:
            entry = parsed(line)
            if float(entry["time"]) >= since and str(entry["host"]).replace("-", "").replace(".", "").isalnum():
                hosts[str(entry["host"])] += 1
        except (ValueError, TypeError, KeyError):
            continue
    return {host: count for host, count in hosts.most_common() if count >= MANY}


def in_words(found: dict[str, int]) -> str:
    """For example "n3 (4), n7 (3)"."""
    return ", ".join(f"{host} ({count})" for host, count in found.items())
