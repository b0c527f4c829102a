"""Hooks run as root: whom they trust, what they end, and that they end in time whatever hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hooks_harness import BOUND_S, REPO, SLACK_S, Hooks, as_root
from recorded import Node, ended
from test_runner import HungMount

from nvrx_slurm.health.hooks import suspicion
from nvrx_slurm.system import trust

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

NOBODY, ANOTHER = 65534, 65533


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    return Hooks(tmp_path, dgx)


# --- who is trusted ---------------------------------------------------------------------------------------------------


def _package(hooks: Hooks) -> Path:
    """A copy of the package that writes a file when it is imported."""
    place = hooks.root / "packages"
    shutil.copytree(REPO / "nvrx_slurm", place / "nvrx_slurm", ignore=shutil.ignore_patterns("__pycache__"))
    with (place / "nvrx_slurm" / "__init__.py").open("a") as file:
        file.write(f"\nopen({str(hooks.root / 'imported')!r}, 'w').close()\n")
    hooks.add(PACKAGE=place)
    return place


def _python(hooks: Hooks) -> Path:
    """A Python below a directory of its own, reached by a link."""
    there, here = hooks.root / "there", hooks.root / "bin"
    there.mkdir()
    here.mkdir()
    (there / "python").write_text(f'#!/bin/sh\n: >{hooks.root}/imported\nexec {sys.executable} "$@"\n')
    (there / "python").chmod(0o755)
    (here / "python").symlink_to(there / "python")
    hooks.add(PYTHON=here / "python")
    return there


def _own(path: Path, uid: int = NOBODY) -> None:
    os.chown(path, uid, -1, follow_symlinks=False)


def _compiled(package: Path) -> None:
    """A folder of a user, still empty, for the compiled forms of root's modules."""
    place = package / "__pycache__"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    _own(place)


# What is trusted as long as it is root's, and who makes it his own: (prepare, spoil).
SPOILT: dict[str, tuple[Callable[[Hooks], Path], Callable[[Path], None]]] = {
    "a module that all can write to": (_package, lambda p: (p / "nvrx_slurm" / "errors.py").chmod(0o666)),
    "a module of a user": (_package, lambda p: _own(p / "nvrx_slurm" / "health" / "hooks.py")),
    "a folder of a user": (_package, lambda p: _own(p / "nvrx_slurm" / "health")),
    "a folder of a user for compiled modules": (_package, lambda p: _compiled(p / "nvrx_slurm" / "health")),
    "a folder that the group can write to": (_package, lambda p: p.chmod(0o775)),
    "a Python of a user": (_python, lambda p: _own(p / "python")),
    "a link of a user": (_python, lambda p: _own(p.parent / "bin" / "python")),
    "a folder of a user behind a link": (_python, lambda p: _own(p)),
}

# The package itself, which says that it was imported, is trusted still.
INSIDE = {
    "a module that all can write to",
    "a module of a user",
    "a folder of a user",
    "a folder of a user for compiled modules",
}


@pytest.mark.parametrize("what", SPOILT)
def test_nothing_that_a_user_can_change_is_run(hooks: Hooks, what: str) -> None:
    prepare, spoil = SPOILT[what]
    place = prepare(hooks)
    assert hooks.run("prolog").code == 0
    mark = hooks.root / "imported"
    assert mark.exists(), "the copy is not what is run"
    mark.unlink()
    spoil(place)
    hooks.break_lustre()
    ran = hooks.run("prolog")
    assert (ran.code, ran.log, hooks.asked()) == (0, "", []), "a broken hook lets the job run"
    assert mark.exists() == (what in INSIDE), "something was run that is not trusted"
    hooks.add(ON_ERROR="fail")
    assert hooks.run("prolog").code == 1


@pytest.mark.parametrize("name", ["hook.sh", "hooks.conf", "start.py"])
def test_nor_files_of_the_hooks_themselves(hooks: Hooks, name: str) -> None:
    (hooks.directory / name).chmod(0o777)
    ran = hooks.run("prolog")
    assert (ran.code, ran.log) == (0, "")


def test_an_untrusted_site_file_is_not_read(hooks: Hooks) -> None:
    os.chown(hooks.root / "health.yaml", NOBODY, -1)
    ran = hooks.run("prolog")
    assert ran.code == 0 and "this hook does not work: " in ran.log and "is not trusted by root" in ran.log


def test_the_environment_and_the_directory_of_whoever_runs_it_do_not_matter(hooks: Hooks, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("sitecustomize.py", "json.py", "nvrx_slurm.py"):
        (trap / name).write_text("raise SystemExit('trapped')")
    (trap / "sh.env").write_text("exit 9\n")
    shown = tmp_path / "shown"
    script = tmp_path / "own"
    script.write_text(f"#!/bin/sh\n/usr/bin/env >{shown}\n")
    script.chmod(0o755)
    hooks.site(own=[{"name": "shows", "run": [str(script)]}])
    hostile = {
        "PYTHONPATH": str(trap), "PYTHONHOME": str(trap), "PYTHONSTARTUP": str(trap / "json.py"), "TMPDIR": str(trap),
        "ENV": str(trap / "sh.env"), "BASH_ENV": str(trap / "sh.env"), "PATH": str(trap), "IFS": "/n",
        "NVRX_PACKAGE": str(trap), "NVRX_CONFIG": "/nowhere", "LANG": "xx", "SLURM_JOB_WORK_DIR": str(trap),
        "CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_COMMENT": "$(exit 9) `exit 9` ; exit 9 \n exit 9",
    }  # fmt: skip
    assert hooks.run("prolog", **hostile).code == 0
    names = {line.partition("=")[0] for line in shown.read_text().splitlines() if "=" in line}
    assert names <= {"PATH", "LC_ALL", "PWD", "_", "OLDPWD", "SHLVL"} | {n for n in names if n.startswith("SLURM")}
    assert str(trap) not in shown.read_text()


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_error", "code"), [("pass", 0), ("fail", 1)])
def test_a_python_that_never_starts_is_given_up(hooks: Hooks, on_error: str, code: int) -> None:
    script = hooks.root / "python"
    script.write_text(f"#!/bin/sh\ntrap '' ALRM TERM\necho $$ >{hooks.root}/pid\nexec sleep 600\n")
    script.chmod(0o755)
    hooks.add(PYTHON=script, PROLOG_BUDGET=1, ON_ERROR=on_error)
    ran = hooks.run("prolog")
    assert ran.code == code and ran.took_s < 1 + SLACK_S
    assert ended(int((hooks.root / "pid").read_text()))


def test_a_python_on_a_dead_file_system_is_given_up(hooks: Hooks) -> None:
    (hooks.root / "software").mkdir()
    hooks.add(PYTHON=hooks.root / "software" / "python", PROLOG_BUDGET=1)
    mount = HungMount(hooks.root / "software")
    try:
        ran = hooks.run("prolog")
    finally:
        mount.close()
    assert ran.code == 0 and ran.took_s < 1 + SLACK_S


def test_a_package_on_a_dead_file_system_is_given_up(hooks: Hooks) -> None:
    """Python itself starts; the import never ends."""
    (hooks.root / "software").mkdir()
    hooks.add(PACKAGE=hooks.root / "software", PROLOG_BUDGET=1)
    mount = HungMount(hooks.root / "software")
    try:
        ran = hooks.run("prolog")
    finally:
        mount.close()
    assert ran.code == 0 and ran.took_s < 1 + SLACK_S


@pytest.mark.parametrize("conf", ["", "PYTHON=\n", "PYTHON=/no/such/python\n", "junk", "PYTHON=`exit 9`\n(\n\0\xff"])
def test_settings_that_are_wrong_do_not_drain_the_cluster(hooks: Hooks, conf: str) -> None:
    (hooks.directory / "hooks.conf").write_bytes(conf.encode("latin-1"))
    assert hooks.run("prolog").code == 0


@pytest.mark.parametrize("end", ["", "\r\n"])
def test_lines_end_as_people_end_them(hooks: Hooks, end: str) -> None:
    """hooks.conf of an editor that writes no last newline, or of one of Windows."""
    file = hooks.directory / "hooks.conf"
    settings = file.read_text().splitlines()
    file.write_bytes((end or "\n").join([*settings, f"CONFIG={hooks.root}/no-such-file"]).encode() + end.encode())
    assert "no-such-file" in hooks.run("prolog").log, "the last line is not read"
    file.write_bytes((end or "\n").join(settings).encode() + end.encode())
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1


def test_a_site_file_that_is_wrong_is_told(hooks: Hooks) -> None:
    (hooks.root / "health.yaml").write_text("hooks: {undrian: no}\n")
    ran = hooks.run("prolog")
    assert ran.code == 0 and "undrian" in ran.log and "undrain" in ran.log


# --- suspicions -------------------------------------------------------------------------------------------------------

SUCCESS = {"SLURM_JOB_EXIT_CODE2": "0:0"}
LEAVE = """
import os, sys
from nvrx_slurm.health.hooks import suspicion
os.setuid(65534)
print(suspicion.leave("check-failed", "lustre is slow", "lustre", sys.argv[1]))
"""


def _agent(hooks: Hooks, job: str = "7") -> str:
    """What `leave` says to the job's own user."""
    env = {"SLURM_JOB_ID": job, "SLURMD_NODENAME": "n1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(hooks.spool)], env=env, capture_output=True, text=True, timeout=BOUND_S,
        check=True, cwd="/",
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def open_spool(hooks: Hooks) -> Iterator[None]:
    """Suspicions where other users get to; pytest's directories are private."""
    with TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        hooks.spool = Path(base) / "spool"
        hooks.site()
        yield


@pytest.mark.usefixtures("open_spool")
def test_a_suspicion_is_verified(hooks: Hooks) -> None:
    """The job ended well; nobody but the job's agent has seen that something is wrong."""
    hooks.run("prolog")
    assert _agent(hooks) == "True"
    ran = hooks.run("epilog", **SUCCESS)
    assert ran.code == 0 and "suspects this node: check-failed lustre lustre is slow" in ran.log
    assert "pass: " in ran.log and hooks.asked() == [], "the node is well: nothing happens"
    assert "suspects" not in hooks.run("epilog", **SUCCESS).log, "it is told once"
    hooks.run("prolog")
    assert _agent(hooks) == "True"
    hooks.break_lustre()
    hooks.run("epilog", **SUCCESS)
    assert hooks.asked()[-1].startswith("update NodeName=n1 State=DRAIN Reason=nvrx:lustre:/sys/fs/lustre")


@pytest.mark.usefixtures("open_spool")
def test_no_other_job_can_say_something(hooks: Hooks) -> None:
    hooks.run("prolog", SLURM_JOB_UID=str(ANOTHER))
    assert _agent(hooks) == "False", "another user's job"
    assert _agent(hooks, job="8") == "False", "a job without a prolog"
    assert _agent(hooks, job="../7") == "False"
    assert "suspects" not in hooks.run("epilog", SLURM_JOB_UID=str(ANOTHER), **SUCCESS).log


@pytest.mark.usefixtures("open_spool")
@pytest.mark.parametrize("when", [[], ["preflight", "manual"]])
def test_a_suspicion_runs_no_check_that_the_site_keeps_out_of_its_hooks(hooks: Hooks, when: list[str]) -> None:
    hooks.site(checks={"lustre": {"when": when}})
    hooks.run("prolog")
    assert _agent(hooks) == "True"
    hooks.break_lustre()
    ran = hooks.run("epilog", **SUCCESS)
    assert ran.code == 0 and "suspects this node: check-failed lustre" in ran.log and "pass: " in ran.log
    assert hooks.asked() == []


def _secret(hooks: Hooks) -> Path:
    secret = hooks.root / "secret"
    secret.write_text(json.dumps({"v": 1, "kind": "check-failed", "check": "lustre", "text": "secret"}))
    return secret


def _many(file: Path, hooks: Hooks) -> None:
    for number in range(3000):
        (file.parent / f"n1.{number + 100}.jsonl").write_text("x")
    file.write_text("x")


# What a user might put there if he could, and he cannot: the directory is root's.
FORGED: dict[str, Callable[[Path, Hooks], object]] = {
    "a link": lambda file, hooks: file.symlink_to(_secret(hooks)),
    "a FIFO": lambda file, hooks: os.mkfifo(file),
    "a directory without end": lambda file, hooks: file.symlink_to("/proc/self/root"),
    "the file of another": lambda file, hooks: (file.write_text("x"), _own(file, ANOTHER)),
    "10 MB": lambda file, hooks: file.write_bytes(b"x" * 10_000_000),
    "junk": lambda file, hooks: file.write_bytes(bytes(range(256)) * 10),
    "deep junk": lambda file, hooks: file.write_text("[" * 16000),
    "lies": lambda file, hooks: file.write_text('{"v": 1, "kind": [], "check": {}, "text": 0}\n{"v": 2}\n[]\n1\n' * 50),
    "check names": lambda file, hooks: file.write_text(
        '{"v": 1, "kind": "check-failed", "check": "../x\\u0000", "text": "\\u001b[2J"}'
    ),
    "many files": _many,
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_suspicion_causes_a_check_at_most(hooks: Hooks, what: str) -> None:
    hooks.run("prolog")
    file = hooks.spool / "n1.7.jsonl"
    file.unlink()
    FORGED[what](file, hooks)
    if what not in ("a link", "a FIFO", "a directory without end", "the file of another"):
        _own(file)
    ran = hooks.run("epilog", **SUCCESS)
    assert ran.code == 0 and "pass: " in ran.log and hooks.asked() == []
    assert "secret" not in ran.log and "\x1b" not in ran.log
    assert not os.path.lexists(file)
    if what == "a link":
        assert (hooks.root / "secret").exists()


@pytest.fixture
def users_directory(hooks: Hooks) -> Path:
    """The site's mistake: suspicions below a directory of a user."""
    mine = hooks.root / "users"
    mine.mkdir()
    _own(mine)
    hooks.spool = mine / "spool"
    hooks.site()
    return mine


def test_nothing_is_made_in_a_directory_of_a_user(hooks: Hooks, users_directory: Path) -> None:
    ran = hooks.run("prolog")
    assert ran.code == 0 and "cannot tell what it suspects" in ran.log and str(users_directory) in ran.log
    assert list(users_directory.iterdir()) == []
    (users_directory / "spool").mkdir()  # root's, but the user may exchange it at any time
    assert "cannot tell what it suspects" in hooks.run("prolog").log
    assert list((users_directory / "spool").iterdir()) == []
    assert "cannot be read" in hooks.run("epilog", **SUCCESS).log


def test_a_directory_is_made_with_those_above_it_where_only_root_can(hooks: Hooks) -> None:
    hooks.spool = hooks.root / "a" / "b" / "spool"
    hooks.site()
    assert hooks.run("prolog").code == 0
    (file,) = hooks.spool.iterdir()
    assert file.name == "n1.7.jsonl" and file.stat().st_uid == NOBODY


def test_a_directory_exchanged_after_the_look_gets_no_file(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is faster than root: between looking and opening the directory becomes a link."""
    spool, elsewhere = hooks.root / "spool", hooks.root / "elsewhere"
    spool.mkdir()
    elsewhere.mkdir()
    real = trust.require

    def require(path: str, refused: type[Exception]) -> str:
        found = real(path, refused)
        spool.rename(hooks.root / "aside")
        spool.symlink_to(elsewhere)
        return found

    monkeypatch.setattr(trust, "require", require)
    with pytest.raises(OSError, match="Not a directory"):
        suspicion.allow(str(spool), "n1", "7", NOBODY)
    assert spool.is_symlink() and list(elsewhere.iterdir()) == []


def test_a_directory_that_is_not_roots_is_not_used(hooks: Hooks) -> None:
    hooks.run("prolog")
    _own(hooks.spool)
    assert "cannot tell what it suspects" in hooks.run("prolog").log
    assert "cannot be read" in hooks.run("epilog", **SUCCESS).log


# --- left-over GPU processes ------------------------------------------------------------------------------------------


class Machine:
    """A node with this machine's processes and GPUs that are files."""

    def __init__(self, hooks: Hooks) -> None:
        self.root = hooks.root / "machine"
        for name in ("dev", "run"):
            (self.root / name).mkdir(parents=True)
        (self.root / "proc").symlink_to("/proc")
        hooks.add(SYSROOT=self.root)

    def process(self, after: ExitStack, device: str, uid: int, job: str) -> subprocess.Popen[bytes]:
        """A process of `uid` that has `device` open, and a job in its environment."""
        (self.root / "dev" / device).touch()
        fd = os.open(self.root / "dev" / device, os.O_RDONLY)
        process = subprocess.Popen(
            ["/bin/sleep", "600"], env={"SLURM_JOB_ID": job} if job else {}, user=uid, pass_fds=[fd], cwd="/"
        )
        os.close(fd)
        after.callback(process.wait, BOUND_S)
        after.callback(process.kill)
        return process


def test_only_gpu_processes_of_the_job_are_ended(hooks: Hooks) -> None:
    machine = Machine(hooks)
    with ExitStack() as after:
        victims = [machine.process(after, f"nvidia{n}", NOBODY, "7") for n in (0, 1)]
        spared = [
            machine.process(after, "nvidia0", NOBODY, "8"),  # the user's other job on this node
            machine.process(after, "nvidia0", NOBODY, "77"),
            machine.process(after, "nvidia0", NOBODY, ""),
            machine.process(after, "nvidia0", ANOTHER, "7"),  # who claims to be of somebody else's job
            machine.process(after, "nvidia0", 0, "7"),
            machine.process(after, "nvidiactl", NOBODY, "7"),  # no GPU of its own
            machine.process(after, "null", NOBODY, "7"),
        ]
        ran = hooks.run("epilog", **SUCCESS)
        assert ran.code == 0 and "ended 2 left-over GPU processes: sleep" in ran.log
        assert [process.wait(BOUND_S) for process in victims] == [-signal.SIGKILL] * 2
        assert [process.poll() for process in spared] == [None] * len(spared)


def test_the_site_may_end_them_itself(hooks: Hooks) -> None:
    machine = Machine(hooks)
    hooks.site(hooks={"kill_gpu_processes": False})
    with ExitStack() as after:
        process = machine.process(after, "nvidia0", NOBODY, "7")
        assert hooks.run("epilog", **SUCCESS).code == 0
        assert process.poll() is None


def test_roots_own_jobs_are_known_by_their_cgroup_only(hooks: Hooks) -> None:
    machine = Machine(hooks)
    with ExitStack() as after:
        process = machine.process(after, "nvidia0", 0, "7")
        assert hooks.run("epilog", SLURM_JOB_UID="0", **SUCCESS).code == 0
        assert process.poll() is None
