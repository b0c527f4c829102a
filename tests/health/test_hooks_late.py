"""A verdict that is known reaches Slurm, whatever hangs; who has none in time takes what others have found."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hooks_harness import Hooks, as_root
from recorded import Node
from test_hooks import beside, hung_lustre, wait_for
from test_runner import HungMount

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.hooks import sick
from nvrx_slurm.health.hooks.aside import Aside

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

FAILED = {"SLURM_JOB_EXIT_CODE2": "1:0"}
LONG_S = 50
UPTIME = Path("/proc/uptime")


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    return Hooks(tmp_path, dgx)


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that takes a question and never answers: SIGKILL does not end who has asked."""
    place = tmp_path / "dead"
    place.mkdir()
    try:
        mount = HungMount(place)
    except OSError as error:
        pytest.skip(f"no FUSE mount can be made here: {error}")
    taken = threading.Thread(target=mount.take)
    taken.start()
    yield place
    asked = not taken.is_alive()
    mount.close()
    taken.join()
    assert asked, "nobody has looked at the dead disk"


def view(node: Node) -> NodeView:
    """With a /run for marks and locks."""
    (node / "/run").mkdir(exist_ok=True)
    return NodeView(str(node.root))


def drained(hooks: Hooks) -> bool:
    return any("State=DRAIN Reason=nvrx:lustre:" in line for line in hooks.asked())


def turns(hooks: Hooks) -> list[Path]:
    directory = hooks.node / "/run/nvrx-health"
    directory.mkdir(mode=0o700, exist_ok=True)
    return [directory / f"turn.{number}" for number in range(len(os.sched_getaffinity(0)))]


@contextlib.contextmanager
def all_turns_taken(hooks: Hooks) -> Iterator[None]:
    """No hook may load what it needs."""
    with contextlib.ExitStack() as stack:
        for path in turns(hooks):
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def waiting(hooks: Hooks) -> int:
    """How many hooks wait for a turn."""
    inodes = "|".join(str(path.stat().st_ino) for path in turns(hooks))
    return len(re.findall(rf" -> FLOCK .*:({inodes}) ", Path("/proc/locks").read_text()))


def mark(hooks: Hooks, text: str = "99999999999\n") -> Path:
    """As a hook that finds the node sick; the default is later than any hook."""
    directory = hooks.node / "/run/nvrx-health"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "sick-n1").write_text(text)
    return directory / "sick-n1"


# --- disks that are dead ----------------------------------------------------------------------------------------------


def test_a_spool_on_a_dead_disk_keeps_no_sick_node_in_use(hooks: Hooks, dead: Path) -> None:
    hooks.site(hooks={"suspicions": str(dead / "spool")})
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1 and drained(hooks)


def test_a_spool_on_a_dead_disk_keeps_no_job_from_a_healthy_node(hooks: Hooks, dead: Path) -> None:
    hooks.site(hooks={"suspicions": str(dead / "spool")})
    for _ in range(2):  # the second one does not even get at the disk
        ran = hooks.run("prolog")
        assert ran.code == 0 and ": pass: " in ran.log, ran.log
        assert ran.log.count("the job cannot tell what it suspects: no answer in time") == 1, ran.log


def test_the_epilog_looks_at_a_node_whose_spool_is_on_a_dead_disk(hooks: Hooks, dead: Path) -> None:
    hooks.site(hooks={"suspicions": str(dead / "spool")})
    hooks.break_lustre()
    ran = hooks.run("epilog", **FAILED)
    assert ran.code == 0 and drained(hooks)
    assert ran.log.count("what the job suspects cannot be read: no answer in time") == 1, ran.log


@pytest.mark.parametrize(("hook", "code"), [("prolog", 1), ("epilog", 0), ("healthcheck", 0)])
def test_log_on_a_dead_disk_keeps_no_sick_node_in_use(hooks: Hooks, dead: Path, hook: str, code: int) -> None:
    """hook.sh would be late only after LONG_S; a process that cannot be killed would keep it."""
    hooks.add(LOG=dead / "log", PROLOG_BUDGET=LONG_S, HEALTHCHECK_BUDGET=LONG_S, EPILOG_BUDGET=LONG_S)
    hooks.break_lustre()
    ran = hooks.run(hook, **FAILED)
    assert ran.code == code and drained(hooks) and ran.took_s < LONG_S / 2


@pytest.mark.parametrize("hook", ["prolog", "epilog"])
def test_a_known_verdict_outlives_a_drain_that_hangs(hooks: Hooks, dead: Path, hook: str) -> None:
    """scontrol is on the dead disk; hook.sh ends the hook in the middle of it."""
    hooks.add(SCONTROL=dead / "scontrol", PROLOG_BUDGET=4, EPILOG_BUDGET=4)
    hooks.break_lustre()
    assert hooks.run(hook, **FAILED).code == 1


def test_one_process_at_most_is_blocked_by_a_dead_disk(dgx: Node, tmp_path: Path) -> None:
    """Who comes while another one is at it, for ever, does not even look at the disk."""
    node, touched = view(dgx), tmp_path / "touched"

    def look() -> bytes:
        touched.touch()
        return b""

    with open(f"{cache.private_directory(node)}/spool.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        with pytest.raises(cache.Unusable, match="no answer in time"):
            Aside(node, "spool", look, 0.5).result()
        assert not touched.exists()  # it may get the lock, and do so, as soon as that is free


def test_what_is_done_aside_tells_what_comes_of_it(dgx: Node) -> None:
    node = view(dgx)
    many = b"x" * 300_000  # more than a pipe holds
    assert Aside(node, "spool", lambda: many, 60).result() == many

    def broken() -> bytes:
        raise OSError(28, os.strerror(28))

    with pytest.raises(cache.Unusable, match="No space left on device"):
        Aside(node, "spool", broken, 60).result()


# --- prologs that are late --------------------------------------------------------------------------------------------


def test_a_prolog_that_waits_for_its_turn_takes_what_was_found_meanwhile(hooks: Hooks) -> None:
    """It came before the other one was done, and loads nothing."""
    place = hung_lustre(hooks)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(hooks.run, "prolog")
        fifo = os.open(place, os.O_WRONLY)  # until it reads
        with all_turns_taken(hooks):
            second = pool.submit(hooks.run, "prolog", SLURM_JOB_ID="8")
            wait_for(lambda: waiting(hooks) == 1)
            os.write(fifo, b"NOT HEALTHY")
            os.close(fifo)
            assert first.result().code == 1
        assert second.result().code == 1
    assert "job 8" not in (hooks.root / "log").read_text(), "it has looked itself"


@pytest.mark.parametrize("found_sick", [False, True])
def test_who_gets_no_turn_in_time_does_not_load(hooks: Hooks, found_sick: bool) -> None:
    hooks.add(PROLOG_BUDGET=5, PYTHON=loud_python(hooks))
    with concurrent.futures.ThreadPoolExecutor() as pool, all_turns_taken(hooks):
        ran = pool.submit(hooks.run, "prolog")
        wait_for(lambda: waiting(hooks) == 1)
        if found_sick:
            mark(hooks)
        assert ran.result().code == int(found_sick)
    assert not (hooks.root / "python-ran").exists()


def test_who_gets_his_turn_when_the_node_is_known_to_be_sick_does_not_load(hooks: Hooks) -> None:
    hooks.add(PYTHON=loud_python(hooks))
    mark(hooks)
    assert hooks.run("prolog").code == 1
    assert not (hooks.root / "python-ran").exists()


def loud_python(hooks: Hooks) -> Path:
    """It leaves a file, and hangs."""
    python = hooks.root / "python"
    python.write_text(f"#!/bin/sh\ntouch {hooks.root}/python-ran\nexec sleep 600\n")
    python.chmod(0o755)
    return python


def hundredths(less: float = 0.0) -> str:
    return f"{int((float(UPTIME.read_text().split()[0]) - less) * 100)}\n"


def test_a_late_prolog_takes_what_was_found_since_it_came(hooks: Hooks) -> None:
    hooks.add(PROLOG_BUDGET=3, PYTHON=loud_python(hooks))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ran = pool.submit(hooks.run, "prolog")
        wait_for((hooks.root / "python-ran").exists)
        sick.found(view(hooks.node), "n1")
        assert ran.result().code == 1
    (hooks.root / "python-ran").unlink()
    assert hooks.run("prolog").code == 0, "what was found before it came"
    assert (hooks.root / "python-ran").exists()


@pytest.mark.parametrize("trouble", ["before", "another node", "not a number", "empty", "a link", "others' directory"])
def test_what_is_no_mark_of_now_refuses_no_job(hooks: Hooks, trouble: str) -> None:
    hooks.add(PROLOG_BUDGET=2, PYTHON=loud_python(hooks))
    text = {"before": hundredths(1.0), "not a number": "99999999999x\n", "empty": ""}.get(trouble, "99999999999\n")
    path = mark(hooks, text)
    if trouble == "another node":
        path.rename(path.with_name("sick-n2"))
    elif trouble == "a link":
        path.rename(hooks.root / "mark")
        path.symlink_to(hooks.root / "mark")
    elif trouble == "others' directory":
        os.chown(path.parent, 65534, -1)
    assert hooks.run("prolog").code == 0
    assert (hooks.root / "python-ran").exists()


def test_a_mark_counts_for_who_had_come_by_then(dgx: Node) -> None:
    node = view(dgx)
    before_s = cache.now_s() - 1.0
    assert not sick.found_since(node, "n1", before_s)
    sick.found(node, "n1")
    assert sick.found_since(node, "n1", before_s) and not sick.found_since(node, "n2", before_s)
    later_s = cache.now_s() + 0.5
    wait_for(lambda: cache.now_s() > later_s)
    assert not sick.found_since(node, "n1", later_s)
    assert [path.name for path in (dgx / "/run/nvrx-health").iterdir()] == ["sick-n1"]


def test_the_prolog_is_hurried(hooks: Hooks) -> None:
    """Jobs on the same node keep its processors busy."""
    script = hooks.root / "nice"
    script.write_text(f"#!/bin/sh\nnice >>{hooks.root}/niceness\n")
    script.chmod(0o755)
    hooks.site(own=[{"name": "nice", "run": [str(script)], "when": ["prolog", "periodic"]}])
    for hook in ("prolog", "healthcheck"):
        assert hooks.run(hook).code == 0
    usual = os.nice(0)
    assert (hooks.root / "niceness").read_text().split() == [str(max(-20, usual - 10)), str(usual)]


def test_a_turn_is_given_back_before_the_checks(hooks: Hooks) -> None:
    place = hung_lustre(hooks)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ran = pool.submit(hooks.run, "prolog")
        fifo = os.open(place, os.O_WRONLY)  # until it reads
        taken = [path for path in turns(hooks) if path.exists()]
        assert len(taken) == 1
        with taken[0].open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fifo, b"healthy")
        os.close(fifo)
        assert ran.result().code == 0


# --- looks that are shared --------------------------------------------------------------------------------------------


def test_a_fault_before_a_prolog_comes_is_found_while_another_one_looks(hooks: Hooks) -> None:
    """The first one has looked at lustre already; its own check goes on until the second one has come."""
    fifo = hooks.root / "fifo"
    os.mkfifo(fifo)
    slow = hooks.root / "slow"
    slow.write_text(f"#!/bin/sh\n[ -e {hooks.root}/not-again ] || read -r _ <{fifo}\n")
    slow.chmod(0o755)
    own = {"name": "slow", "run": [str(slow)], "when": ["prolog"], "reuse": 0.001, "budget": 50}
    hooks.site(deadlines={"prolog": 55}, own=[own])
    hooks.add(PROLOG_BUDGET=60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(hooks.run, "prolog")
        with fifo.open("w") as preflight:  # until it reads
            looked_s = time.monotonic() + 1.0  # long after lustre has passed
            wait_for(lambda: time.monotonic() > looked_s)
            hooks.break_lustre()
            (hooks.root / "not-again").touch()
            second = pool.submit(hooks.run, "prolog", SLURM_JOB_ID="8")
            beside(hooks, 1)
            preflight.write("go on\n")
        assert (first.result().code, second.result().code) == (0, 1)
