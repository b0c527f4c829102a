"""The facts that `nvrx doctor` judges: slurm.conf as Slurm shows it, and hooks.conf as hook.sh reads it."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import time
from typing import NamedTuple

from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.system import trust

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
MARK = "nvrx_slurm hook: "  # in the second line of prolog/prolog, prolog/epilog and prolog/healthcheck
PROGRAMS = {"Prolog": "prolog", "Epilog": "epilog", "HealthCheckProgram": "healthcheck"}
HOOK_SH_S = 60.0  # for hook.sh to answer
_SCONTROL_S = 10.0
_LONGEST_FILE = 65536


class Line(NamedTuple):
    """What was found about one thing. `status`: OK, INFO, WARN or FAIL; `advice`: what to do, "" if nothing."""

    name: str
    status: str
    text: str
    advice: str = ""


def judged(name: str, good: str, *problems: tuple[bool, str, str, str]) -> Line:
    """The line for the first problem (whether it is there, status, text, advice) that is there; else OK with `good`."""
    found = next((problem[1:] for problem in problems if problem[0]), (OK, good, ""))
    return Line(name, *found)


class Site(NamedTuple):
    """`slurm`: `scontrol show config`, {} if it does not answer, for the reason `problem`; `directory`: the folder of
    our hooks, "" if they are not installed; `conf`: settings of hooks.conf, and "?NAME" for unknown ones."""

    slurm: dict[str, str]
    problem: str
    directory: str
    conf: dict[str, str]

    @property
    def file(self) -> str:
        """Path of hooks.conf."""
        return f"{self.directory or '/etc/nvrx'}/hooks.conf"

    def seconds(self, key: str, otherwise: float) -> float:
        """The number in a value of slurm.conf such as "30 sec"."""
        found = re.match(r"\d+", self.slurm.get(key, ""))
        return float(found[0]) if found else otherwise


def find_site(hooks: str = "", scontrol: str = "") -> Site:
    """Ask Slurm and hook.sh. `hooks`: the folder of the hooks, "" as slurm.conf says; `scontrol`: "" for the one in
    PATH."""
    from nvrx_slurm.slurm import drain

    slurm, problem = dict[str, str](), ""
    try:
        path = drain.find(scontrol or shutil.which("scontrol") or "")
        slurm = parse_config(drain.Scontrol(path, "localhost", time.monotonic() + _SCONTROL_S).config())
    except NvrxError as error:
        problem = str(error)
    directory = os.path.realpath(hooks) if hooks else _directory(slurm)
    return Site(slurm, problem, directory, _conf(directory))


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` by name; "(null)" is "". The values of Prolog[0], Prolog[1], ... are joined by blanks."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        name = re.sub(r"\[\d+\]$", "", key.strip())
        if equals and name:
            value = "" if value.strip() == "(null)" else value.strip()
            found[name] = f"{found[name]} {value}" if name in found and key.strip().endswith("]") else value
    return found


def scripts(setting: str) -> list[str]:
    """The files that a Prolog, Epilog or HealthCheckProgram of slurm.conf names; it may be a pattern."""
    return [path for word in setting.split() for path in sorted(glob.glob(word)) or [word]]


def text_of(path: str) -> str:
    """The begin of a file, "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_FILE).decode(errors="replace")
    except OSError:
        return ""


def untrusted(path: str) -> str:
    """Why we do not trust a file, "" if we do."""
    try:
        trust.require(path, UsageError)
    except UsageError as error:
        return str(error)
    return ""


def hook_sh(directory: str, word: str) -> subprocess.CompletedProcess[str]:
    """Run hook.sh with one of its words for us. Raises OSError, and UsageError if it is not trusted or hangs."""
    shell = f"{directory}/hook.sh"
    for path in (shell, f"{directory}/hooks.conf"):
        trust.require(path, UsageError)
    try:
        return subprocess.run(
            ["/bin/sh", shell, word], env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=HOOK_SH_S, check=False, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"{shell} {word} does not end within {HOOK_SH_S:g} s; look at what it starts") from None


def _directory(slurm: dict[str, str]) -> str:
    for key in PROGRAMS:
        for path in scripts(slurm.get(key, "")):
            if MARK in text_of(path):
                return os.path.dirname(os.path.realpath(path))
    return ""


def _conf(directory: str) -> dict[str, str]:
    try:
        lines = hook_sh(directory, "settings").stdout.splitlines() if directory else []
    except (OSError, UsageError):
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in lines) if name}
