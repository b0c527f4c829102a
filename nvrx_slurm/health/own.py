"""Checks of a site: an executable (exit code 0 pass, 1 fail, 2 unknown; one line of output), or a `Check` in Python."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict
from nvrx_slurm.system import trust

if TYPE_CHECKING:
    from nvrx_slurm.config.site import OwnCheck

BUDGET_S = 10.0
_KEPT_BYTES = 4096  # of what it prints; the rest is read and forgotten
_MARGIN_S = 0.25  # to end it and all that it started before we are ended ourselves
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_VERDICTS = {0: Verdict.PASS, 1: Verdict.FAIL, 2: Verdict.UNKNOWN}


class Facts(NamedTuple):
    """How a command ended. `code`: negative = by that signal, None = still running when its time was up."""

    code: int | None
    line: str


def check(own: OwnCheck, where: str) -> Check:
    """The check that a site's file describes. Raises UsageError if it cannot be used."""
    if own.python:
        return _python(own, where)
    argv = list(own.run)
    if not argv or not argv[0].startswith("/"):
        raise UsageError(f"{where}: own check {own.name}: run must begin with an absolute path; hooks have no PATH")
    try:
        _require_usable(argv)
    except UsageError as error:
        raise UsageError(f"{where}: own check {own.name}: {error}") from None
    return Check(
        name=own.name,
        reads=" ".join(argv),
        fails="The command exits with 1.",
        gather=lambda node, expected: run(argv, node),
        judge=judge,
        budget_s=BUDGET_S,
        per_job="" if own.rule.reuse_s else "SLURM_JOB_ID",
    )


def _require_usable(argv: list[str]) -> None:
    """Raises UsageError unless the command can be executed and is trusted; by root with all files that it is given.

    The path itself is executed, not what its links lead to: many programs look at the name by which they are called.
    """
    for word in argv:
        if word is argv[0] or (trust.as_root() and word.startswith("/") and os.path.lexists(word)):
            trust.require(word, UsageError)
    if not os.path.isfile(argv[0]) or not os.access(argv[0], os.X_OK):
        raise UsageError(f"{argv[0]} cannot be executed; name a program, or give it mode 755")


def _python(own: OwnCheck, where: str) -> Check:
    from importlib import import_module

    module, _, name = own.python.partition(":")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # somebody else's module may raise anything
        raise UsageError(f"{where}: own check {own.name}: {own.python} cannot be imported ({error})") from None
    if not isinstance(found, Check):
        raise UsageError(f"{where}: own check {own.name}: {own.python} must be a nvrx_slurm.health.check.Check")
    return found._replace(name=own.name)


def run(argv: list[str], node: NodeView) -> Facts:
    """Run the command in a session of its own until it ends or our time is nearly up; nothing it started survives.

    A keeper, forked from this process (the child of the check), runs it: not of our group, it outlives us, whoever
    kills us and whenever, just long enough to end all below it.
    """
    from nvrx_slurm.system import processes  # in the child process of the check, after the fork

    node.doing(f"running {argv[0]}")
    processes.end_with_parent(signal.SIGKILL)
    env = {name: value for name, value in node.env.items() if name.startswith("SLURM")}
    leash, held = os.pipe()  # nobody writes: its end is ours
    answer, theirs = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(held)
        _keep(argv, {"PATH": _PATH, "LC_ALL": "C", **env}, node.deadline_s - _MARGIN_S, leash, theirs)
    os.close(theirs)
    with open(answer, "rb") as pipe:
        told = pipe.read()
    os.waitpid(keeper, 0)
    for fd in (leash, held):
        os.close(fd)
    if not told.startswith(b"["):
        raise OSError(told.decode() or "the process that watches it was ended")
    return Facts(*json.loads(told))


def _keep(argv: list[str], env: dict[str, str], until_s: float, leash: int, answer: int) -> NoReturn:
    """The keeper: never returns into the caller's frames."""
    from nvrx_slurm.system import processes

    try:
        os.setsid()
        orphans = processes.Orphans()
        ours, theirs = os.pipe()
        child = processes.start(argv, env, theirs, theirs)
        os.close(theirs)
        os.set_blocking(ours, False)
        output, ended = _follow(child.pidfd, ours, leash, until_s)
        code = child.reap() if ended else None
        if not ended:
            child.signal_group(signal.SIGKILL)
        orphans.kill(())
        words = output.decode(errors="replace").strip().splitlines()
        os.write(answer, json.dumps(Facts(code, words[0] if words else "")).encode())
    except OSError as error:
        os.write(answer, f"no process could be started for it: {error.strerror}".encode())
    finally:
        os._exit(0)


def _follow(pidfd: int, pipe: int, leash: int, until_s: float) -> tuple[bytes, bool]:
    """(first bytes of the output, whether the process ended); drains the pipe, so that it never blocks on us."""
    poller = select.poll()
    for fd in (pidfd, pipe, leash):
        poller.register(fd, select.POLLIN)
    kept = b""
    while (left_s := until_s - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(int(min(left_s, 3600.0) * 1000) + 1)}
        if leash in ready:
            break
        if pipe in ready:
            more = os.read(pipe, 1 << 20)
            kept = (kept + more)[:_KEPT_BYTES]
            if not more:
                poller.unregister(pipe)
        elif pidfd in ready:
            return kept, True
    return kept, False


def judge(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """By exit code; any other code, a signal and no end at all are unknown."""
    said = f": {facts.line}" if facts.line else ""
    if facts.code is None:
        return Verdict.UNKNOWN, f"timed out{said}"
    if facts.code < 0:
        return Verdict.UNKNOWN, f"ended by signal {-facts.code}{said}"
    verdict = _VERDICTS.get(facts.code)
    if verdict is None:
        return Verdict.UNKNOWN, f"exit code {facts.code}, which is none of 0, 1, 2{said}"
    return verdict, facts.line or f"exit code {facts.code}"
