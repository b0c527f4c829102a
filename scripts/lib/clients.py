"""`scripts/dev/clients`: foreign programs, unchanged, under nvrx-run on this machine (CPU, gloo), with faults; a table.

A module of TABLES has a list CASES. A case names the packages that pip fetches, the command line of nvrx-run, the
faults and what must be true in the end. Our own driver scripts are in `client_programs/`. Exit code 0: all cases hold;
1: one does not; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heard import Heard

TABLES = ("clients_nvrx", "clients_megatron", "clients_hf", "clients_torch", "clients_steps")
PROGRAMS = Path(__file__).with_name("client_programs")
NVRX_RUN, TORCHRUN = "nvrx_slurm.cli.run", "torch.distributed.run"
_INSTALL_S = 900.0
_LOOK_S = 0.05
_LEFT_S = 3.0
_SHARED = "/dev/shm"
_FINAL = re.compile(r"\bfinal .*")


@dataclass(frozen=True)
class Fault:
    """A signal to a rank, once the output since the last fault has a line that `after` (a regex) matches."""

    signum: signal.Signals
    rank: int
    after: str

    def __str__(self):
        return f"{self.signum.name} rank {self.rank}"


def kill(rank, after):
    """The rank dies."""
    return Fault(signal.SIGKILL, rank, after)


def hang(rank, after):
    """The rank stands still."""
    return Fault(signal.SIGSTOP, rank, after)


@dataclass(frozen=True)
class Case:
    """One program, one course of events.

    `argv`: flags of nvrx-run, the program and its arguments. "{programs}" is the folder of our drivers, "{dir}" an
    empty folder of this case, "{site}" the folder where pip puts packages. The log directory is added.
    """

    name: str
    packages: tuple[str, ...]  # as pip takes them, with flags of pip
    argv: tuple[str, ...]
    faults: tuple[Fault, ...] = ()  # of this script; a program may make others itself
    with_deps: bool = True  # False: pip install --no-deps
    needs: tuple[str, ...] = ()  # packages that pip then installs as usual
    env: dict[str, str] = field(default_factory=dict)
    launcher: str = NVRX_RUN
    code: int = 0  # exit code of the launcher
    restarts: int | None = None  # of processes; None: one for each of `faults`
    says: tuple[str, ...] = ()  # regexes that lines of the output match
    same_as: str = ""  # the undisturbed case: the last line with "final ..." must be equal to its
    timeout_s: float = 180.0


@dataclass
class Outcome:
    """What became of a case; `wrong` is empty where all that must be true is."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    final: str = ""
    code: int = -1
    restarts: int = -1
    down_s: float = 0.0
    took_s: float = 0.0


class Job(Heard):
    """One nvrx-run."""

    def __init__(self, command, directory, env):
        self.directory = directory
        super().__init__(command, cwd=directory, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *why):
        super().__exit__(*why)
        (self.directory / "output").write_text("".join(self.lines))

    def line(self, pattern, first, until_s):
        """Number of the first line from `first` on that matches; -1 where there is none in time."""

        def look():
            numbers = range(first, len(self.lines))
            return next((number for number in numbers if re.search(pattern, self.lines[number])), None)

        number = self.find(look, until_s)
        return -1 if number is None else number

    def rank_pid(self, rank):
        """Process id of a rank, which is the one of its processes that no other of them started."""
        mine = {}
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                env = (proc / "environ").read_bytes().split(b"\0")
                parent = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended, or is of another user
                continue
            if b"RANK=%d" % rank in env and any(
                one.startswith(b"NVRX_RUN_DIR=" + os.fsencode(self.directory)) for one in env
            ):
                mine[int(proc.name)] = parent
        return next((pid for pid, parent in mine.items() if parent not in mine), None)


def strike(job, case, until_s):
    """Inject the faults of a case; a sentence where one could not be injected, else ""."""
    number = -1
    for fault in case.faults:
        number = job.line(fault.after, number + 1, until_s)
        if number < 0:
            return f"{fault} was not injected: no line matches {fault.after!r}"
        pid = job.rank_pid(fault.rank)
        if pid is None:
            return f"{fault} was not injected: there is no such rank"
        os.kill(pid, fault.signum)
        number = len(job.lines)
    return ""


def run(case, python, directory):
    """Run a case in an empty directory."""
    directory.mkdir(parents=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    places = {"{programs}": str(PROGRAMS), "{dir}": str(directory), "{site}": site}
    argv = [re.sub(r"\{\w+\}", lambda found: places.get(found[0], found[0]), word) for word in case.argv]
    logs = [f"--log-dir={directory}/logs"] if case.launcher == NVRX_RUN else []
    command = [str(python), "-m", case.launcher, "--standalone", *logs, *argv]
    # The package's folder comes by the environment of Python, not by the working directory.
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NVRX_", "PET_", "PYTHONPATH"))}
    outcome, began_s, shared = Outcome(case), time.monotonic(), set(os.listdir(_SHARED))
    until_s = began_s + case.timeout_s
    with Job(command, directory, plain | case.env) as job:
        if why := strike(job, case, until_s):
            outcome.wrong.append(why)
        code = job.wait(until_s - time.monotonic() if not why else 0)
        if code is None and not why:
            outcome.wrong.append(f"it does not end within {case.timeout_s:g} s")
    outcome.took_s = time.monotonic() - began_s
    if not outcome.wrong:
        outcome.code = -1 if code is None else code
        _judge(outcome, job, directory)
        outcome.wrong += [f"left: {one}" for one in _left(directory, shared)]
    return outcome


def _left(directory, shared):
    """What is there after a moment: new files of shared memory, and processes that work in the case's folder."""
    until_s = time.monotonic() + _LEFT_S
    while True:
        files = [f"{_SHARED}/{name}" for name in set(os.listdir(_SHARED)) - shared]
        found = files + [str(one.parent) for one in Path("/proc").glob("[0-9]*/cwd") if _is(one, directory)]
        if not found or time.monotonic() >= until_s:
            return found
        time.sleep(_LOOK_S)


def _is(link, directory):
    with contextlib.suppress(OSError):
        return link.readlink() == directory
    return False


def _judge(outcome, job, directory):
    case = outcome.case
    if outcome.code != case.code:
        outcome.wrong.append(f"exit code {outcome.code}, not {case.code}")
    results = list(directory.glob("logs/**/result.json"))
    if results:
        result: dict[str, Any] = json.loads(results[0].read_text())
        outcome.restarts, outcome.down_s = result["restarts_used"], result["down_s"]
    expected = len(case.faults) if case.restarts is None else case.restarts
    if outcome.restarts != expected:
        outcome.wrong.append(f"{outcome.restarts} restarts, not {expected}")
    text = "".join(job.lines)
    outcome.wrong += [f"no line matches {pattern!r}" for pattern in case.says if not re.search(pattern, text)]
    outcome.final = (_FINAL.findall(text) or [""])[-1]


def venv_for(case, parent):
    """Python of a virtual environment with the packages of a case, made if it is not there.

    The environment of this Python comes last on its path, for torch and nvrx_slurm.
    """
    name = re.sub(r"[^\w.=-]+", "_", "+".join((*case.packages, *case.needs))) or "plain"
    venv = parent / "venvs" / name
    python = venv / "bin" / "python"
    if (venv / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=_INSTALL_S)
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "zz-torch-of-the-other.pth").write_text(ours)
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    if case.packages:
        more = [] if case.with_deps else ["--no-deps"]
        words = [word.replace("{site}", str(packages)) for word in case.packages]
        subprocess.run([*pip, *more, *words], check=True, timeout=_INSTALL_S, stdin=subprocess.DEVNULL)
    if case.needs:
        subprocess.run([*pip, *case.needs], check=True, timeout=_INSTALL_S, stdin=subprocess.DEVNULL)
    (venv / "complete").touch()
    return python


def all_cases():
    """The cases of all tables, by name."""
    return {case.name: case for table in TABLES for case in importlib.import_module(table).CASES}


def _chosen(names, cases):
    """Those whose name begins with one of `names` (all: none are given), after the cases they are compared with."""
    found = [case for case in cases.values() if case.name.startswith(tuple(names)) or not names]
    needed = [cases[case.same_as] for case in found if case.same_as]
    return list({case.name: case for case in (*needed, *found)}.values())


@contextmanager
def _folder(given):
    """A temporary one where none is given."""
    if given is not None:
        yield Path(given).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="nvrx-clients-") as made:
        yield Path(made)


def _row(outcome):
    faults = ", ".join(map(str, outcome.case.faults)) or "-"
    verdict = "; ".join(outcome.wrong) or "ok"
    figures = f"{outcome.code:>4} {outcome.restarts:>8} {outcome.down_s:>7.2f} {outcome.took_s:>6.1f}"
    return f"{outcome.case.name:32} {faults:34} {figures}  {verdict}"


def main():
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(prog="scripts/dev/clients", description="Foreign programs under nvrx-run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose name begins so [all]")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--dir", help="keep environments and output in this folder [a temporary one]")
    args = parser.parse_args()
    cases = all_cases()
    for name in args.names:
        if not any(case.startswith(name) for case in cases):
            parser.error(f"no case is called {name}; there are {', '.join(cases)}")
    chosen = _chosen(args.names, cases)
    if args.list:
        print("\n".join(f"{case.name:32} {' '.join(case.packages)}" for case in chosen))
        return 0
    print(f"{'case':32} {'faults':34} {'code':>4} {'restarts':>8} {'down s':>7} {'s':>6}  verdict", flush=True)
    finals: dict[str, str] = {}
    failed = 0
    with _folder(args.dir) as folder:
        folder.mkdir(parents=True, exist_ok=True)
        runs = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
        for case in chosen:
            outcome = _outcome(case, folder, runs)
            finals[case.name] = outcome.final
            if case.same_as and (not outcome.final or outcome.final != finals[case.same_as]):
                outcome.wrong.append(f"{outcome.final!r} instead of {finals[case.same_as]!r}")
            failed += bool(outcome.wrong)
            print(_row(outcome), flush=True)
            output = runs / case.name / "output"
            if outcome.wrong and output.exists():
                print("".join(f"    {line}\n" for line in output.read_text().splitlines()[-25:]), flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} cases hold", flush=True)
    return 1 if failed else 0


def _outcome(case, folder, runs):
    try:
        return run(case, venv_for(case, folder), runs / case.name)
    except (OSError, subprocess.SubprocessError) as error:  # the network, pip: the other cases go on
        return Outcome(case, [f"{type(error).__name__}: {error}"])
