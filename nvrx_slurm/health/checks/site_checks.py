"""Checks of a site: an executable with exit code 0 (pass), 1 (fail) or 2 (unknown) that prints one line.

The executable is read only in the child process that runs the check. A problem with it is unknown of this one
check, and no reason to leave out the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvrx_slurm.child import bounded_process
from nvrx_slurm.child.bounded_process import Ended
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, Check, Judgement, NodeView, Verdict
from nvrx_slurm.system import trust

if TYPE_CHECKING:
    from nvrx_slurm.config.site import SiteCheck

BUDGET_S = 10.0
_KEPT_BYTES = 4096  # longest output that is kept; the rest is dropped
_MARGIN_S = 0.25  # to end all its processes before the runner ends this one
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_VERDICTS = {0: Verdict.PASS, 1: Verdict.FAIL, 2: Verdict.UNKNOWN}


def check(own: SiteCheck, where: str) -> Check:
    """The check that a site file describes. Raises UsageError for a command without an absolute path."""
    argv = list(own.run)
    if not argv[0].startswith("/"):
        raise UsageError(
            f"{where}: own check {own.name}: run must begin with an absolute path; hooks have no PATH"
        )
    return Check(
        name=own.name,
        reads=" ".join(argv),
        fails="The command exits with 1.",
        examine=lambda node, expected: judge(run(argv, node)),
        contexts=OUTSIDE_PREFLIGHT,
        budget_s=BUDGET_S,
    )


def require_usable(argv: Sequence[str]) -> None:
    """Raises UsageError unless the command is executable and trusted; for root also all files among its arguments.

    The path itself is executed, not the target of its links: many programs read the name of their call.
    """
    for word in argv:
        if word is argv[0] or (trust.as_root() and word.startswith("/") and os.path.lexists(word)):
            trust.require(word, UsageError)
    if not os.path.isfile(argv[0]) or not os.access(argv[0], os.X_OK):
        raise UsageError(f"{argv[0]} cannot be executed; name a program, or give it mode 755")


def run(argv: list[str], node: NodeView) -> Ended:
    """Run the command until it ends or the time of this check is nearly up; no process that it started survives.

    This process is the child of one check: what loses its parent, in any session, comes to it and is killed at the end,
    also when the process that forked it was killed.
    """
    from nvrx_slurm.child import processes  # after the fork: it loads subprocess and ctypes

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    require_usable(argv)
    node.doing(f"running {argv[0]}")
    slurm = {name: value for name, value in node.env.items() if name.startswith("SLURM")}
    signal.signal(signal.SIGTERM, stop)
    processes.end_with_parent(signal.SIGTERM)
    orphans = processes.Orphans()
    left_s = node.deadline_s - _MARGIN_S - time.monotonic()
    try:
        return bounded_process.run(
            argv, {"PATH": _PATH, "LC_ALL": "C", **slurm}, left_s, limit=_KEPT_BYTES
        )
    finally:
        orphans.kill()


def judge(ended: Ended) -> Judgement:
    """The verdict by exit code; any other code, a signal and no end at all are unknown."""
    texts = (data.decode(errors="replace").strip() for data in (ended.stdout, ended.stderr))
    line = next((text.splitlines()[0] for text in texts if text), "")
    if ended.code in _VERDICTS:
        return _VERDICTS[ended.code], line or f"exit code {ended.code}"
    by_signal = ended.code is not None and ended.code < 0
    how = (
        f"ended by signal {-(ended.code or 0)}"
        if by_signal
        else f"exit code {ended.code}, not 0, 1 or 2"
    )
    return (
        Verdict.UNKNOWN,
        f"{'timed out' if ended.code is None else how}{f': {line}' if line else ''}",
    )
