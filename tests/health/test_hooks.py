"""Prolog, epilog and HealthCheckProgram: their decisions, and their calls of scontrol. In this process."""

import os
import sys

import pytest
from hooks_harness import DRAIN, FAILED, HOOKS, SHOW, SLACK_S, SUCCESS, UNDRAIN, drained, made, script

from nvrx_slurm.health import kept
from nvrx_slurm.health.hooks import drains

pytestmark = HOOKS

WARN = {"lustre": {"on_fail": "warn"}}


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    return made(tmp_path, monkeypatch)


def test_a_healthy_node_gets_its_job_and_slurmctld_is_not_asked(hooks):
    ran = hooks.run("prolog")
    assert ran.code == 0 and "n1 job 7: pass: " in ran.log, ran.log
    assert hooks.run("epilog", **FAILED).code == 0 and hooks.asked() == []


# (hook, rules, environment, exit code, calls of scontrol) on a node with a broken Lustre.
BROKEN = [
    ("prolog", {}, {}, 1, [SHOW, DRAIN]),
    ("prolog", WARN, {}, 0, []),
    ("epilog", {}, SUCCESS, 0, []),
    ("epilog", {}, FAILED, 0, [SHOW, f"{DRAIN} (after job 7, exit code 1:0)"]),
    ("epilog", {}, {"SLURM_JOB_DERIVED_EC": "3"}, 0, [SHOW, f"{DRAIN} (after job 7, exit code 0)"]),
    ("epilog", {"lustre": {"on_fail": "fail"}}, FAILED, 0, []),
    ("healthcheck", {}, {}, 0, [SHOW, SHOW, DRAIN]),
    ("healthcheck", {"lustre": {"on_fail": "fail"}}, {}, 0, [SHOW]),
]


@pytest.mark.parametrize("row", BROKEN, ids=str)
def test_a_failure_drains_with_our_reason(hooks, row):
    hook, rules, env, code, asked = row
    hooks.site(checks=rules)
    hooks.break_lustre()
    ran = hooks.run(hook, **env)
    assert (ran.code, hooks.asked()) == (code, asked)
    assert ("lustre: fail: " in ran.log) == (env != SUCCESS and "SLURM_JOB_EXIT_CODE" not in env or bool(asked))


@pytest.mark.parametrize(
    "note, said",
    [(drained("fan 3 is loud", "MIXED+DRAIN", "alice"), "already (fan 3"),
     (drained("keep: a fan"), "already"), ("NodeName=n1 State=DOWN* Reason=Not responding", "already"),
     ("junk", "does not name"), ("NodeName=n2 State=IDLE", "does not name")],
)  # fmt: skip
def test_a_drain_and_a_reason_of_others_are_never_overwritten(hooks, note, said):
    """A node whose note cannot be read may be drained by others. The exit code keeps the job away, and Slurm drains."""
    unknown = int(said == "does not name")
    hooks.slurm_says(note)
    hooks.break_lustre()
    for hook, code in (("prolog", 1), ("epilog", unknown), ("healthcheck", 0)):
        ran = hooks.run(hook, **FAILED)
        assert ran.code == code and said in ran.log, (hook, ran)
    assert set(hooks.asked()) == {SHOW}


@pytest.mark.parametrize("trouble", ["fails", "hangs", "is not trusted"])
def test_slurm_drains_if_we_cannot(hooks, trouble, monkeypatch):
    """A drain needs more modules than the checks, and others may be able to change them."""
    (hooks.root / f"scontrol-{trouble}").touch()
    if trouble == "is not trusted":
        monkeypatch.setitem(sys.modules, "nvrx_slurm.slurm.api.cli", None)  # import raises ImportError
    hooks.settings["PROLOG_BUDGET"] = 3
    hooks.break_lustre()
    for hook in ("prolog", "epilog"):
        ran = hooks.run(hook, **FAILED)
        assert ran.code == 1 and "the node cannot be drained" in ran.log and ran.took_s < 3 + SLACK_S


def test_a_check_that_hangs_leaves_time_to_tell_slurm(hooks):
    """The check may take longer than the whole hook."""
    hooks.settings["PROLOG_BUDGET"] = 3
    os.unlink(hooks.node / "sys/fs/lustre/health_check")
    os.mkfifo(hooks.node / "sys/fs/lustre/health_check")
    hooks.site(checks={"lustre": {"budget": 60}}, deadlines={"prolog": 60})
    ran = hooks.run("prolog")
    assert ran.code == 0 and "lustre: unknown: timed out" in ran.log
    hooks.site(checks={"lustre": {"budget": 60, "on_unknown": "drain"}}, deadlines={"prolog": 60})
    ran = hooks.run("prolog")
    assert ran.code == 1 and hooks.updates()[0].split("Reason=")[1].startswith("nvrx:lustre:timed out"), ran.log
    assert ran.took_s < 3 + SLACK_S


@pytest.mark.parametrize(
    "allowed, comment, code",
    [
        ((), "nvrx:skip", 1), (("mounts",), "nvrx:skip=lustre", 1), (("lustre",), "run 5; nvrx:skip=lustre", 0),
        (("all",), "nvrx:skip=lustre,mounts", 0), (("all",), "nvrx:skip=mounts", 1), (("all",), "xnvrx:skip", 1),
    ],
)  # fmt: skip
def test_a_comment_skips_what_the_site_allows(hooks, allowed, comment, code):
    hooks.site(hooks={"allow_skip": list(allowed)})
    hooks.break_lustre()
    assert hooks.run("prolog", SLURM_JOB_COMMENT=comment).code == code


def test_a_wrong_or_untrusted_site_file_is_not_obeyed(hooks):
    hooks.break_lustre()
    (hooks.root / "health.yaml").write_text("hooks: {undrian: no}\n")
    ran = hooks.run("prolog")
    assert ran.code not in (0, 1) and "undrian" in ran.log
    hooks.site()
    os.chown(hooks.root / "health.yaml", 65534, -1)
    ran = hooks.run("prolog")
    assert ran.code not in (0, 1) and "not trusted" in ran.log and hooks.asked() == []


def test_slurmctld_is_asked_once_while_all_is_well(hooks):
    for _ in range(3):
        assert hooks.run("healthcheck").code == 0
    assert hooks.asked() == [SHOW]
    (hooks.node / "proc/sys/kernel/random/boot_id").write_text("two\n")
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW] * 2


@pytest.mark.parametrize("by", ["healthcheck", "prolog"])
def test_it_takes_back_what_hooks_drained(hooks, by):
    hooks.run("healthcheck")
    hooks.break_lustre()
    hooks.run(by)
    assert hooks.updates() == [DRAIN]
    asked = len(hooks.asked())
    hooks.run("healthcheck")
    assert hooks.asked()[asked:] == [SHOW], "still broken"
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked()[asked + 1 :] == [SHOW, SHOW, UNDRAIN]


@pytest.mark.parametrize("states", ["IDLE+DRAIN+MAINTENANCE+RESERVED", "DOWN", "INVAL+IDLE+DRAIN"])
def test_a_node_of_ours_is_taken_back_when_its_other_state_is_over(hooks, states):
    hooks.slurm_says(drained("nvrx:lustre:x", states))
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW]
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert hooks.note() == "IDLE" and hooks.asked()[-1] == UNDRAIN


def test_a_drain_that_came_late_is_found_within_an_hour(hooks, monkeypatch):
    """As one that slurmctld did not confirm, or that came while the periodic hook asked."""
    hooks.run("healthcheck")
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW], "in service"
    later_s = kept.now_s() + drains.ASK_AGAIN_S
    monkeypatch.setattr(kept, "now_s", lambda: later_s)
    hooks.run("healthcheck")
    assert hooks.note() == "IDLE"


def test_a_reason_that_changes_while_the_checks_run_keeps_the_node(hooks):
    hooks.slurm_says(drained("nvrx:lustre:x"))
    changed = drained("nvrx:lustre,fan:x")
    hooks.own("fan", ["periodic"])
    script(hooks.root / "fan", f"echo '{changed}' >{hooks.root}/note")
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


def test_a_second_failure_has_to_pass_too(hooks):
    """`fan` is the epilog's check. The node was drained for lustre, which passes."""
    fan = hooks.own("fan", ["epilog"])
    hooks.break_lustre()
    hooks.run("prolog")
    hooks.mend_lustre()
    fan.touch()
    ran = hooks.run("epilog", **FAILED)
    assert ran.code == 0 and "fan: fail: it stands still" in ran.log and "drained for more" in ran.log, ran.log
    before = hooks.note()
    assert before.startswith("IDLE+DRAIN nvrx:lustre,fan")
    assert "fan: fail: it stands still" in hooks.run("healthcheck").log
    assert hooks.note() == before
    fan.unlink()
    assert "taken back: lustre passes again, fan passes again" in hooks.run("healthcheck").log
    assert hooks.note() == "IDLE"


def test_a_check_that_does_not_apply_any_more_has_not_passed(hooks):
    hooks.slurm_says(drained("nvrx:lustre:x"))
    os.unlink(hooks.node / "sys/fs/lustre/health_check")
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW]


@pytest.mark.parametrize(
    "site, reason, back",
    [
        ({}, "nvrx:lustre:x", True),
        ({"hooks": {"undrain": False}}, "nvrx:lustre:x", False),
        ({"checks": {"lustre": {"when": ["prolog"]}}}, "nvrx:lustre:x", True),  # run because it failed
        ({"checks": {"lustre": {"when": []}}}, "nvrx:lustre,no-such-check:x", False),
        ({"checks": {"lustre": {"when": ["preflight"]}}}, "nvrx:lustre,gpu-leftovers:x", False),
    ],
)
def test_the_site_decides_what_is_taken_back(hooks, site, reason, back):
    hooks.site(**site)
    hooks.slurm_says(drained(reason))
    hooks.run("healthcheck")
    assert hooks.updates() == ([UNDRAIN] if back else [])
