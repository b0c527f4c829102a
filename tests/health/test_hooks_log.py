"""What hooks tell: it reaches those who listen, and who does not listen keeps no sick node in use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hooks_harness import SLACK_S, Hooks, as_root
from recorded import Node
from test_runner import HungMount

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

HOOKS = {"prolog": 1, "epilog": 0, "healthcheck": 0}  # exit code on a sick node
FAILED = {"SLURM_JOB_EXIT_CODE2": "1:0"}
LONG_S = 50  # of a hook that would wait for whoever does not listen


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    return Hooks(tmp_path, dgx)


class SystemLog:
    """A /dev of the hook's own, with a /dev/log that takes messages until `deafen`."""

    def __init__(self, directory: Path) -> None:
        (directory / "null").touch()
        self.path = directory / "log"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        mount = shutil.which("mount")
        script = f'{mount} --bind /dev/null {directory}/null && {mount} --rbind {directory} /dev && exec "$@"'
        self.around = [shutil.which("unshare") or "", "-m", "/bin/sh", "-c", script, "sh"]

    def deafen(self) -> None:
        """Fill its queue: a daemon that is stopped."""
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
            pytest.raises(BlockingIOError),
        ):
            while True:
                sender.sendto(b"<30>x", str(self.path))

    def told(self) -> str:
        """All that it got."""
        found = b""
        while True:
            try:
                found += self.socket.recv(65536, socket.MSG_DONTWAIT) + b"\n"
            except BlockingIOError:
                return found.decode()


@pytest.fixture
def system_log(hooks: Hooks) -> Iterator[SystemLog]:
    with TemporaryDirectory() as directory:  # pytest's are too long for a socket
        found = SystemLog(Path(directory))
        if not found.around[0] or subprocess.run([*found.around, "/bin/true"], check=False).returncode:
            pytest.skip("no mount namespaces here")
        hooks.around = found.around
        yield found
        found.socket.close()


def drained(hooks: Hooks) -> bool:
    return any("State=DRAIN Reason=nvrx:lustre:" in line for line in hooks.asked())


def test_the_systems_log_gets_each_line_with_its_level(hooks: Hooks, system_log: SystemLog) -> None:
    hooks.break_lustre()
    hooks.run("prolog")
    lines = [line for line in system_log.told().splitlines() if " nvrx-prolog[" in line]
    assert [line for line in lines if line.startswith("<27>") and "]: n1 job 7: drained: nvrx:lustre:" in line], lines
    assert [line for line in lines if line.startswith("<30>") and ": fail: " in line and " checks in " in line], lines


@pytest.mark.parametrize("hook", HOOKS)
def test_a_systems_log_that_hangs_keeps_no_sick_node_in_use(hooks: Hooks, system_log: SystemLog, hook: str) -> None:
    hooks.add(PROLOG_BUDGET=LONG_S, EPILOG_BUDGET=LONG_S)
    hooks.break_lustre()
    system_log.deafen()
    ran = hooks.run(hook, **FAILED)
    assert ran.code == HOOKS[hook] and drained(hooks) and ": drained: nvrx:lustre" in ran.log
    assert ran.took_s < LONG_S / 2
    assert "drained" not in system_log.told(), "it listened"


def test_a_systems_log_that_hangs_delays_no_hook_that_does_not_work(hooks: Hooks, system_log: SystemLog) -> None:
    (hooks.root / "empty").mkdir()
    hooks.add(PROLOG_BUDGET=LONG_S, PACKAGE=hooks.root / "empty", ON_ERROR="fail")
    system_log.deafen()
    ran = hooks.run("prolog")
    assert ran.code == 1 and ran.took_s < LONG_S / 2


def test_what_does_not_work_is_told_to_the_systems_log(hooks: Hooks, system_log: SystemLog) -> None:
    (hooks.root / "empty").mkdir()
    hooks.add(PACKAGE=hooks.root / "empty")
    system_log.socket.settimeout(SLACK_S)
    assert hooks.run("prolog").code == 0
    said = system_log.socket.recv(65536).decode()  # nobody waits for logger(1)
    assert " nvrx-prolog: " in said and ("No module named 'nvrx_slurm'" in said or "ended with 3" in said)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_full_disk_below_log_keeps_no_sick_node_in_use(hooks: Hooks, hook: str) -> None:
    """/dev/full takes nothing: a real "No space left on device"."""
    hooks.add(LOG="/dev/full")
    hooks.break_lustre()
    assert hooks.run(hook, **FAILED).code == HOOKS[hook] and drained(hooks)


def test_a_log_that_cannot_be_used_is_said_to_the_systems_log(hooks: Hooks, system_log: SystemLog) -> None:
    hooks.add(LOG=hooks.root / "no" / "such" / "log")
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1 and drained(hooks)
    told = system_log.told()
    assert told.count("/no/such/log cannot be used: ") == 1 and "drained: nvrx:lustre" in told


def test_a_log_on_a_dead_file_system_keeps_no_sick_node_in_use(hooks: Hooks) -> None:
    (hooks.root / "logs").mkdir()
    hooks.add(LOG=hooks.root / "logs" / "log", PROLOG_BUDGET=LONG_S)
    hooks.break_lustre()
    mount = HungMount(hooks.root / "logs")
    try:
        ran = hooks.run("prolog")
    finally:
        mount.close()
    assert ran.code == 1 and drained(hooks) and ran.took_s < LONG_S / 2


def test_a_module_that_exits_does_not_say_that_the_node_is_well(hooks: Hooks) -> None:
    package = hooks.root / "packages" / "nvrx_slurm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit(0)\n")
    hooks.add(PACKAGE=package.parent, ON_ERROR="fail")
    assert hooks.run("prolog").code == 1
    assert os.listdir(package.parent) == ["nvrx_slurm"]
