"""Checks of a site: an executable (exit code 0 pass, 1 fail, 2 unknown; one line of output), or a `Check` in Python.

What is in the site file is looked at when that is read; the executable and the module only in the child process that
runs the check: what is wrong with them is unknown of this one check, and no reason to leave out the others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import registry, runner
from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, Check, Expected, NodeView, Setting, Verdict
from nvrx_slurm.system import trust

if TYPE_CHECKING:
    from nvrx_slurm.config.site import OwnCheck, Rule

BUDGET_S = 10.0
_KEPT_BYTES = 4096  # of what it prints; the rest is read and forgotten
_MARGIN_S = 0.25  # to end it and all that it started before we are ended ourselves
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_VERDICTS = {0: Verdict.PASS, 1: Verdict.FAIL, 2: Verdict.UNKNOWN}
# What a site's file says and a module cannot: nobody has imported it when that is asked. Fields of Check: keys.
_SITES_OWN = {"contexts": "when", "on_fail": "on_fail", "on_unknown": "on_unknown", "reuse_s": "reuse"}


class Facts(NamedTuple):
    """How a command ended. `code`: negative = by that signal, None = still running when its time was up."""

    code: int | None
    line: str


def check(own: OwnCheck, where: str) -> Check:
    """The check that a site's file describes, as far as that tells. Raises UsageError for what cannot be meant."""
    argv = list(own.run)
    if argv and not argv[0].startswith("/"):
        raise UsageError(f"{where}: own check {own.name}: run must begin with an absolute path; hooks have no PATH")
    module, _, name = own.python.partition(":")
    if not argv and not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise UsageError(f"{where}: own check {own.name}: python must be package.module:NAME, not {own.python!r}")
    return Check(
        name=own.name,
        reads=" ".join(argv) or own.python,
        fails="The command exits with 1." if argv else f"As {own.python} says.",
        gather=(lambda node, expected: run(argv, node)) if argv else (lambda *asked: _in_python(own, *asked)),
        judge=judge if argv else (lambda found, expected: found),
        contexts=OUTSIDE_PREFLIGHT,
        settings=tuple(Setting(name, "plain", None, f"of {own.python}") for name in own.settings),
        budget_s=BUDGET_S,
        per_job="" if own.rule.reuse_s else "SLURM_JOB_ID",
    )


def trial(own: OwnCheck) -> Check:
    """What only looks whether the check can be run here, and by us."""

    def look(node: NodeView, expected: Expected) -> None:
        if own.run:
            _require_usable(own.run)
        else:
            _found(own, node)

    return Check(own.name, own.python, "", look, lambda *_: (Verdict.PASS, "can be run"), budget_s=BUDGET_S)


def _require_usable(argv: Sequence[str]) -> None:
    """Raises UsageError unless the command can be executed and is trusted; by root with all files that it is given.

    The path itself is executed, not what its links lead to: many programs look at the name by which they are called.
    """
    for word in argv:
        if word is argv[0] or (trust.as_root() and word.startswith("/") and os.path.lexists(word)):
            trust.require(word, UsageError)
    if not os.path.isfile(argv[0]) or not os.access(argv[0], os.X_OK):
        raise UsageError(f"{argv[0]} cannot be executed; name a program, or give it mode 755")


# --- Python -----------------------------------------------------------------------------------------------------------


def _in_python(own: OwnCheck, node: NodeView, expected: Expected) -> tuple[Verdict, str]:
    """The verdict of the module's check: in the child process, which it may block or end."""
    found = _found(own, node)
    return runner.examine(found, node, _typed(found, own, expected))


def _found(own: OwnCheck, node: NodeView) -> Check:
    """The check in the module. Raises ValueError with the reason if there is none, or if it says what only the site's
    file can."""
    module, _, name = own.python.partition(":")
    node.doing(f"importing {module}")
    if trust.as_root() and PathFinder in sys.meta_path:  # not there in hooks, which have a finder like it
        sys.meta_path[sys.meta_path.index(PathFinder)] = _TrustedFinder
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # somebody else's module may raise anything
        raise ValueError(f"{own.python} cannot be imported ({type(error).__name__}: {error})") from None
    if not isinstance(found, Check):
        raise ValueError(f"{own.python} must be a nvrx_slurm.health.check.Check")
    for field, key in _SITES_OWN.items():
        if getattr(found, field) != Check._field_defaults[field] and _unsaid(own.rule, key):
            raise ValueError(f"{own.python} has {field}, which nobody knows before it runs; say {key} in the site file")
    return found


def _unsaid(rule: Rule, key: str) -> bool:
    return getattr(rule, "reuse_s" if key == "reuse" else key) is None


def _typed(found: Check, own: OwnCheck, expected: Expected) -> dict[str, Any]:
    """What is expected, with the module's own settings. Raises UsageError for what a setting cannot be."""
    from nvrx_slurm.config import site

    kinds = {setting.name: setting.kind for setting in found.settings}
    given = {name: expected[name] for name in {*kinds, *own.settings} if expected.get(name) is not None}
    return {**expected, **registry.defaults([found]), **site.expected(given, kinds, own.python)}


class _TrustedFinder:
    """Finds modules as Python does; for root, none that others can change."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As PathFinder.find_spec; raises ImportError for what is not trusted."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.has_location:
            return spec
        cache = os.path.dirname(spec.cached or "")  # who may write there makes the compiled form after we have looked
        for place in (spec.origin, spec.cached, cache):
            if place and os.path.lexists(place):
                trust.require(place, ImportError)
        return spec


# --- a command --------------------------------------------------------------------------------------------------------


def run(argv: list[str], node: NodeView) -> Facts:
    """Run the command in a session of its own until it ends or our time is nearly up; nothing it started survives.

    A keeper, forked from this process (the child of the check), runs it: not of our group, it outlives us, whoever
    kills us and whenever, just long enough to end all below it.
    """
    from nvrx_slurm.system import processes  # in the child process of the check, after the fork

    _require_usable(argv)
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
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        child = processes.start(argv, env, its_out, its_err)
        for fd in (its_out, its_err):
            os.close(fd)
        output, ended = _follow(child.pidfd, (out, err), leash, until_s)
        code = child.reap() if ended else None
        if not ended:
            child.signal_group(signal.SIGKILL)
        orphans.kill(())
        told = [line for text in output for line in text.decode(errors="replace").strip().splitlines()[:1]]
        os.write(answer, json.dumps(Facts(code, told[0] if told else "")).encode())
    except OSError as error:
        os.write(answer, f"no process could be started for it: {error.strerror}".encode())
    finally:
        os._exit(0)


def _follow(pidfd: int, pipes: Sequence[int], leash: int, until_s: float) -> tuple[list[bytes], bool]:
    """(first bytes from each pipe, whether the process ended); drains them, so that it never blocks on us."""
    kept = dict.fromkeys(pipes, b"")
    poller = select.poll()
    for fd in pipes:
        os.set_blocking(fd, False)
    for fd in (pidfd, leash, *pipes):
        poller.register(fd, select.POLLIN)
    still, ended = set(pipes), False
    while not ended and (left_s := until_s - time.monotonic()) > 0:
        ready = {fd for fd, _ in poller.poll(int(min(left_s, 3600.0) * 1000) + 1)}
        if leash in ready:
            break
        ended = pidfd in ready
        for fd in set(still) if ended else ready & still:  # the last words of what has ended are there by now
            if _drain(fd, kept):
                poller.unregister(fd)
                still.remove(fd)
    return list(kept.values()), ended


def _drain(fd: int, kept: dict[int, bytes]) -> bool:
    """Keep the first of what there is; whether that was all."""
    try:
        more = os.read(fd, 1 << 20)
    except BlockingIOError:
        return False
    kept[fd] = (kept[fd] + more)[:_KEPT_BYTES]
    return not more


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
