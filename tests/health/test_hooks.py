"""Prolog, epilog and HealthCheckProgram as whole processes: what they decide, and whom they ask."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hooks_harness import SLACK_S, Hooks, as_root
from recorded import Node
from test_runner import HungMount

from nvrx_slurm.health import policy, runner
from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict
from nvrx_slurm.health.hooks import drain_policy as drain
from nvrx_slurm.health.hooks import run as health_hooks

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

LUSTRE = "nvrx:lustre:/sys/fs/lustre/health_check says 'NOT HEALTHY' instead of healthy"
DRAIN = f"update NodeName=n1 State=DRAIN Reason={LUSTRE}"
SHOW = "show node n1 -o"
UNDRAIN = "update NodeName=n1 State=UNDRAIN"


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    return Hooks(tmp_path, dgx)


def drained(reason: str = LUSTRE, states: str = "IDLE+DRAIN", who: str = "root") -> str:
    return f"NodeName=n1 State={states} ThreadsPerCore=1 Reason={reason} [{who}@2026-11-21T12:00:00]"


def wait_for(condition: Callable[[], bool]) -> None:
    """For what sends no event."""
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.01)


def beside(hooks: Hooks, others: int) -> None:
    """Wait until so many prologs have come to share the look of one that is at it: all have its lock open, and so have
    the checks of the latter."""
    lock = str(hooks.node / "/run/nvrx-health/prolog.lock")
    wait_for(lambda: len(having_open(lock)) == others + 1)


def having_open(path: str) -> set[int]:
    """The processes that have the file open, without what was forked from one of them."""
    found = {}
    for place in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(place) == path:
                directory = Path(place).parents[1]
                found[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
    return {pid for pid, parent in found.items() if parent not in found}


def hung_lustre(hooks: Hooks) -> Path:
    """The prolog's check `lustre` hangs until somebody writes there."""
    place = hooks.node / "/sys/fs/lustre/health_check"
    place.unlink()
    os.mkfifo(place)
    hooks.add(PROLOG_BUDGET=60)
    hooks.site(deadlines={"prolog": 55}, checks={"lustre": {"budget": 50}})
    return place


# --- prolog -----------------------------------------------------------------------------------------------------------


def test_a_healthy_node_gets_its_job_and_slurmctld_is_not_asked(hooks: Hooks) -> None:
    ran = hooks.run("prolog")
    assert ran.code == 0 and "n1 job 7: pass: " in ran.log, ran.log
    assert hooks.asked() == []


def test_prologs_at_the_same_time_share_one_look_at_the_node(hooks: Hooks) -> None:
    """The first one's check hangs until all others wait for it; then it finds a fault, and nobody looks again."""
    place = hung_lustre(hooks)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(hooks.run, "prolog")
        fifo = os.open(place, os.O_WRONLY)  # until it reads
        others = [pool.submit(hooks.run, "prolog") for _ in range(3)]
        beside(hooks, 3)
        os.write(fifo, b"NOT HEALTHY")
        os.close(fifo)
        place.unlink()  # who looked again would find nothing
        ran = [one.result() for one in (first, *others)]
    assert [one.code for one in ran] == [1] * 4
    told = (hooks.root / "log").read_text()
    assert told.count("fail: ") == 8 and told.count(", as another prolog found ") == 3  # with a line for the check


@pytest.mark.parametrize(
    ("before", "after"),
    [(("drain", "/bin/true"), ("warn", "/bin/true")), (("warn", "/bin/false"), ("warn", "/bin/true"))],
)
def test_a_look_under_other_rules_is_not_shared(hooks: Hooks, before: tuple[str, str], after: tuple[str, str]) -> None:
    """While one looks the site file changes: whoever comes then must not take what was meant for the old one."""
    place = hooks.node / "/sys/fs/lustre/health_check"
    place.unlink()
    os.mkfifo(place)
    hooks.add(PROLOG_BUDGET=60)

    def rule(on_fail: str, command: str) -> None:
        own = {"name": "own", "run": [command], "reuse": 0.001}
        hooks.site(deadlines={"prolog": 55}, checks={"lustre": {"budget": 50, "on_fail": on_fail}}, own=[own])

    rule(*before)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(hooks.run, "prolog")
        fifo = os.open(place, os.O_WRONLY)  # until it reads
        rule(*after)
        second = pool.submit(hooks.run, "prolog")
        beside(hooks, 1)
        place.unlink()
        os.write(fifo, b"NOT HEALTHY")
        os.close(fifo)
        place.write_text("NOT HEALTHY")
        assert (first.result().code, second.result().code) == (1, 0)


def test_a_jobs_own_check_runs_beside_the_shared_ones(dgx: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other: one after the other, both would be out of time."""
    place = dgx / "/meeting"
    os.mkfifo(place)

    def gather(mode: int) -> Callable[[NodeView, Expected], None]:
        return lambda node, expected: os.close(os.open(place, mode))

    passed = Verdict.PASS, "they met"
    shared = Check("shared", "", "", gather(os.O_RDONLY), lambda facts, expected: passed, on_unknown="drain")
    mine = shared._replace(name="mine", gather=gather(os.O_WRONLY), per_job="SLURM_JOB_ID")
    rules = policy.Rules("n1", {"shared": shared, "mine": mine}, {}, dict(policy.DEADLINES_S))
    monkeypatch.setattr(policy, "read_rules", lambda *args: rules)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(runner, "stop_on_sigterm", lambda: None)  # here it would be of pytest
    assert health_hooks.main("prolog", {"NVRX_SYSROOT": str(dgx.root), "NVRX_SCONTROL": "/nowhere"}) == 0


def test_a_failure_drains_with_our_reason_and_refuses_the_job(hooks: Hooks) -> None:
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1
    assert hooks.asked() == [SHOW, DRAIN]
    assert drain.parse(LUSTRE) == drain.Reason(("lustre",), LUSTRE.partition(":")[2].partition(":")[2])


def test_all_checks_that_failed_are_in_the_reason(hooks: Hooks) -> None:
    hooks.site(expect={"cpus": 999})
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1
    why = drain.parse(hooks.asked()[1].partition("Reason=")[2])
    assert why is not None and set(why.checks) == {"lustre", "cpu-count"}


def test_a_warning_is_only_logged(hooks: Hooks) -> None:
    hooks.site(checks={"lustre": {"on_fail": "warn"}})
    hooks.break_lustre()
    ran = hooks.run("prolog")
    assert ran.code == 0 and "lustre: fail: " in ran.log
    assert hooks.asked() == []


def test_somebody_elses_drain_is_left_alone(hooks: Hooks) -> None:
    hooks.slurm_says(drained("fan 3 is loud", "MIXED+DRAIN", "alice"))
    hooks.break_lustre()
    ran = hooks.run("prolog")
    assert ran.code == 1 and "MIXED already (fan 3 is loud)" in ran.log
    assert hooks.asked() == [SHOW]


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_slurm_drains_if_we_cannot(hooks: Hooks, trouble: str) -> None:
    (hooks.root / f"scontrol-{trouble}").touch()
    hooks.break_lustre()
    ran = hooks.run("prolog")
    assert ran.code == 1 and "the node cannot be drained" in ran.log
    assert len(hooks.asked()) == 1 and ran.took_s < 6 + SLACK_S


@pytest.mark.parametrize("note", ["", "junk", "NodeName=n2 State=IDLE", "NodeName=n1 Reason=keep: fan [alice@Unknown]"])
@pytest.mark.parametrize(("hook", "code"), [("prolog", 1), ("epilog", 1), ("healthcheck", 0)])
def test_a_node_whose_note_cannot_be_read_is_not_drained_by_us(hooks: Hooks, note: str, hook: str, code: int) -> None:
    """It may be somebody's. The exit code keeps the job away, and Slurm drains with words of its own."""
    hooks.slurm_says(note)
    hooks.break_lustre()
    ran = hooks.run(hook, **{**SUCCESS, "SLURM_JOB_EXIT_CODE2": "1:0"})
    assert ran.code == code and "cannot be drained" in ran.log and "does not tell its state" in ran.log
    assert set(hooks.asked()) == {SHOW}


@pytest.mark.parametrize(("on_unknown", "code"), [("warn", 0), ("drain", 1)])
def test_a_mount_that_hangs_is_named_in_time(hooks: Hooks, on_unknown: str, code: int) -> None:
    hooks.site(checks={"mounts": {"on_unknown": on_unknown}})
    mount = HungMount(hooks.node / "/home")
    try:
        ran = hooks.run("prolog")
    finally:
        mount.close()
    assert ran.code == code and "mounts: unknown: " in ran.log and "/home" in ran.log
    assert ran.took_s < 6 + SLACK_S
    assert bool(hooks.asked()) == bool(code)
    if code:
        assert "/home" in hooks.asked()[1].partition("Reason=nvrx:mounts:")[2]


def test_checks_end_early_enough_to_tell_slurm(hooks: Hooks) -> None:
    """A check with more time than the whole hook has."""
    hooks.site(checks={"lustre": {"budget": 60, "on_unknown": "drain"}}, deadlines={"prolog": 60})
    os.unlink(hooks.node / "/sys/fs/lustre/health_check")
    os.mkfifo(hooks.node / "/sys/fs/lustre/health_check")
    ran = hooks.run("prolog")
    assert ran.code == 1 and hooks.asked()[1].startswith("update NodeName=n1 State=DRAIN Reason=nvrx:lustre:timed out")
    assert ran.took_s < 6 + SLACK_S


@pytest.mark.parametrize(
    ("allowed", "comment", "code"),
    [
        ((), "nvrx:skip", 1), ((), "nvrx:skip=lustre", 1), (("mounts",), "nvrx:skip=lustre", 1),
        (("lustre",), "run 5; nvrx:skip=lustre", 0), (("lustre",), "nvrx:skip", 0), (("all",), "nvrx:skip", 0),
        (("all",), "nvrx:skip=lustre,mounts", 0), (("all",), "nvrx:skip=mounts", 1), (("all",), "nvrx:skipping", 1),
        (("all",), "xnvrx:skip", 1), (("all",), "$(touch /tmp/x) `id` ' \" \\ \x01", 1),
    ],
)  # fmt: skip
def test_a_comment_skips_what_the_site_allows(hooks: Hooks, allowed: tuple[str, ...], comment: str, code: int) -> None:
    hooks.site(hooks={"allow_skip": list(allowed)})
    hooks.break_lustre()
    assert hooks.run("prolog", SLURM_JOB_COMMENT=comment).code == code


# --- periodic ---------------------------------------------------------------------------------------------------------


def test_slurmctld_is_asked_once_per_boot_while_all_is_well(hooks: Hooks) -> None:
    for _ in range(3):
        assert hooks.run("healthcheck").code == 0
    assert hooks.asked() == [SHOW]


def test_it_drains_and_takes_back(hooks: Hooks) -> None:
    hooks.break_lustre()
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW, SHOW, DRAIN]
    hooks.slurm_says(drained())
    hooks.run("healthcheck")
    assert hooks.asked()[3:] == [SHOW], "still broken"
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked()[4:] == [SHOW, SHOW, UNDRAIN]
    hooks.slurm_says("NodeName=n1 State=IDLE ThreadsPerCore=1")
    hooks.run("healthcheck")
    assert len(hooks.asked()) == 7, "asked although nothing can be drained"


def test_after_a_drain_of_the_prolog_it_looks_again(hooks: Hooks) -> None:
    hooks.run("healthcheck")
    hooks.break_lustre()
    hooks.run("prolog")
    hooks.slurm_says(drained())
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked()[-1] == UNDRAIN


@pytest.mark.parametrize(
    "note",
    [
        drained("fan 3 is loud"), drained(f"{LUSTRE} and a fan, see ticket 5".replace("nvrx:", "NVRX:")),
        drained(f"see {LUSTRE}"), drained(who="alice"), drained(states="DOWN+DRAIN"), drained(states="DOWN*+DRAIN"),
        drained(states="IDLE+DRAIN+MAINT"), drained(states="IDLE*+DRAIN"), drained(states="IDLE+DRAIN+REBOOT_ISSUED"),
        drained(states="IDLE+FAIL"), drained(states="IDLE+DRAIN+REBOOT@"), drained(states="IDLE+DRAIN+POWERED_DOWN"),
        drained(states="IDLE+DRAIN+MAINTENANCE"), drained(states="IDLE"), drained("nvrx:kernel-log,no-such-check:gone"),
        drained("nvrx:nvlink-of-old:gone"), "NodeName=n1 State=IDLE+DRAIN", "garbage", "",
    ],
)  # fmt: skip
def test_what_is_not_plainly_ours_is_not_taken_back(hooks: Hooks, note: str) -> None:
    hooks.slurm_says(note)
    assert hooks.run("healthcheck").code == 0
    assert [line for line in hooks.asked() if "update" in line] == []


@pytest.mark.parametrize("states", ["IDLE+CLOUD+DRAIN", "MIXED+DRAIN+DYNAMIC_NORM", "IDLE+DRAIN+PLANNED"])
def test_what_a_node_is_for_good_does_not_keep_it_out(hooks: Hooks, states: str) -> None:
    hooks.slurm_says(drained(states=states))
    hooks.run("healthcheck")
    assert hooks.asked()[-1] == UNDRAIN


def test_a_check_that_does_not_apply_any_more_has_not_passed(hooks: Hooks) -> None:
    """The Lustre client was unloaded: nothing fails now, and nothing says that it is well."""
    hooks.slurm_says(drained())
    os.unlink(hooks.node / "/sys/fs/lustre/health_check")
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


def test_a_check_of_other_hooks_runs_if_it_asked_for_the_drain(hooks: Hooks) -> None:
    hooks.site(checks={"lustre": {"when": ["prolog"]}})
    hooks.slurm_says(drained())
    hooks.break_lustre()
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked()[-1] == UNDRAIN


def test_a_check_that_the_site_switched_off_keeps_no_node_out(hooks: Hooks) -> None:
    """It is not even run; what else asked for the drain still has to pass."""
    hooks.break_lustre()
    hooks.site(checks={"lustre": {"when": []}})
    hooks.slurm_says(drained("nvrx:lustre,no-such-check:gone"))
    ran = hooks.run("healthcheck")
    assert "lustre" not in ran.log and UNDRAIN not in hooks.asked()
    hooks.slurm_says(drained("nvrx:lustre,cpu-count:gone"))
    ran = hooks.run("healthcheck")
    assert hooks.asked()[-1] == UNDRAIN
    assert "taken back: lustre is switched off, cpu-count passes again" in ran.log


def test_the_site_may_want_to_take_back_itself(hooks: Hooks) -> None:
    hooks.site(hooks={"undrain": False})
    hooks.slurm_says(drained())
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


# --- epilog -----------------------------------------------------------------------------------------------------------

SUCCESS = {"SLURM_JOB_EXIT_CODE": "0", "SLURM_JOB_EXIT_CODE2": "0:0", "SLURM_JOB_DERIVED_EC": "0"}


def test_after_success_there_are_no_checks(hooks: Hooks) -> None:
    hooks.break_lustre()
    assert hooks.run("epilog", **SUCCESS).code == 0
    assert hooks.asked() == []


@pytest.mark.parametrize(
    "end",
    [{"SLURM_JOB_EXIT_CODE2": "1:0"}, {"SLURM_JOB_EXIT_CODE2": "0:9"}, {"SLURM_JOB_EXIT_CODE": "256"},
     {"SLURM_JOB_DERIVED_EC": "3"}],
)  # fmt: skip
def test_after_a_failure_the_node_is_looked_at(hooks: Hooks, end: dict[str, str]) -> None:
    ran = hooks.run("epilog", **{**SUCCESS, **end})
    assert ran.code == 0 and "pass: " in ran.log
    hooks.break_lustre()
    assert hooks.run("epilog", **{**SUCCESS, **end}).code == 0
    assert hooks.asked() == [SHOW, DRAIN]


def test_slurm_drains_after_an_epilog_that_cannot(hooks: Hooks) -> None:
    (hooks.root / "scontrol-fails").touch()
    hooks.break_lustre()
    assert hooks.run("epilog", **{**SUCCESS, "SLURM_JOB_EXIT_CODE2": "1:0"}).code == 1
