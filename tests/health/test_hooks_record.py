"""What hooks record of a node that they drained: it is taken back, and only when all that ever failed passes."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from hooks_harness import BOUND_S, FAILED, REPO, SHOW, UNDRAIN, Hooks, as_root, drained, made, script

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.hooks.drains import SETTLE_S, Record

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

# `hooks.run` in another process: HOOK, then the arguments of `Hooks` and the environment as JSON.
RUN = """
import json, sys
from nvrx_slurm.health.hooks import run
sys.exit(run.main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hooks:
    return made(tmp_path, monkeypatch)


def command(hooks: Hooks, when: str, **env: str) -> list[str]:
    given = {f"NVRX_{name}": str(hooks.settings[name]) for name in ("SYSROOT", "SCONTROL", "CONFIG")}
    return [sys.executable, "-c", RUN, when, json.dumps({**given, "NVRX_BUDGET": "50", **env})]


# --- a drain of ours is never forgotten -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "states",
    ["IDLE+DRAIN+MAINTENANCE+RESERVED", "DOWN", "INVAL+IDLE+DRAIN"],
)
def test_a_node_of_ours_is_taken_back_when_its_other_state_is_over(hooks: Hooks, states: str) -> None:
    hooks.slurm_says(drained("nvrx:lustre:x", states))
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW]
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert hooks.note() == "IDLE" and hooks.asked()[-1] == UNDRAIN


def test_a_drain_while_the_periodic_hook_asks_is_not_forgotten(hooks: Hooks) -> None:
    """It has the answer that the node is in service, and has not recorded that yet."""
    hold = hooks.root / "hold"
    os.mkfifo(hold)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        periodic = pool.submit(os.spawnv, os.P_WAIT, sys.executable, command(hooks, "periodic"))
        fifo = os.open(hold, os.O_WRONLY)  # until scontrol waits
        hold.unlink()
        hooks.break_lustre()
        assert hooks.run("prolog").code == 1 and hooks.note().startswith("IDLE+DRAIN nvrx:lustre")
        hooks.mend_lustre()
        os.close(fifo)
        assert periodic.result(BOUND_S) == 0
    hooks.run("healthcheck")
    assert hooks.note() == "IDLE", hooks.record.read_text()


def test_a_drain_that_slurmctld_did_not_confirm_may_still_come(hooks: Hooks) -> None:
    (hooks.root / "scontrol-fails").touch()
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1 and hooks.asked() == [SHOW]
    (hooks.root / "scontrol-fails").unlink()
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW, SHOW], "in service"
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert hooks.note() == "IDLE"


def aged(hooks: Hooks, check: str) -> None:
    """A failure that was recorded long ago."""
    Record(hooks.view, "n1").update([check])
    plain = json.loads(hooks.record.read_text())
    hooks.record.write_text(json.dumps({**plain, "checks": {check: cache.now_s() - SETTLE_S - 1}}))


# --- failures on a node that is drained already -----------------------------------------------------------------------


@pytest.fixture
def fan(hooks: Hooks) -> Path:
    """While it exists the check `fan`, which is the epilog's, fails. The node was drained for lustre, which passes."""
    flag = hooks.own("fan", ["epilog"])
    hooks.break_lustre()
    hooks.run("prolog")
    hooks.mend_lustre()
    flag.touch()
    ran = hooks.run("epilog", **FAILED)
    assert ran.code == 0 and "fan: fail: it stands still" in ran.log and "drained for more" in ran.log, ran.log
    return flag


@pytest.mark.parametrize("known", ["in Slurm", "on the node"])
def test_a_second_failure_has_to_pass_too(hooks: Hooks, fan: Path, known: str) -> None:
    """The record is gone after a boot; the reason is the old one where slurmctld could not be told."""
    assert hooks.note().startswith("IDLE+DRAIN nvrx:lustre,fan")
    if known == "in Slurm":
        hooks.record.unlink()
    else:
        hooks.slurm_says(drained("nvrx:lustre:x"))
    before = hooks.note()
    assert "fan: fail: it stands still" in hooks.run("healthcheck").log
    assert hooks.note() == before
    fan.unlink()
    assert "taken back: lustre passes again, fan passes again" in hooks.run("healthcheck").log
    assert hooks.note() == "IDLE"


def test_a_second_failure_of_the_periodic_hook_is_not_forgotten(hooks: Hooks) -> None:
    """It fails, and then does not apply any more: that is no pass."""
    hooks.own("fan", ["periodic"])
    hooks.slurm_says(drained("nvrx:fan:x"))
    hooks.break_lustre()
    hooks.run("healthcheck")
    assert hooks.note().startswith("IDLE+DRAIN nvrx:fan,lustre:x")
    asked = len(hooks.asked())
    hooks.run("healthcheck")
    assert hooks.asked()[asked:] == [SHOW], "nothing new"
    os.unlink(hooks.node / "sys/fs/lustre/health_check")
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


def test_a_failure_while_the_node_is_taken_back_drains_it_again(hooks: Hooks) -> None:
    """The epilog saw it drained still, and left it at that."""
    hooks.own("fan", ["epilog"]).touch()
    words = " ".join(f"'{word}'" for word in command(hooks, "epilog", SLURM_JOB_ID="7", **FAILED))
    script(
        hooks.root / "during", f"PYTHONPATH={REPO} {words} >>{hooks.root}/during.log 2>&1".replace("'-c' '\n", "'-c' '")
    )
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert [line.partition(" Reason=")[0] for line in hooks.updates() if "State=" in line] == [
        UNDRAIN,
        "update NodeName=n1 State=DRAIN",
    ], (hooks.root / "during.log").read_text()
    assert "nvrx:fan:failed while" in hooks.note()


# --- the record itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{", "[]", '{"boot": "one"}', '{"boot": "one", "checks": {"a": "b"}}'])
def test_a_damaged_record_is_unknown(hooks: Hooks, text: str) -> None:
    Record(hooks.view, "n1").update(since_s=1.0)
    assert json.loads(hooks.record.read_text()) == {"boot": "one", "checks": {}}
    hooks.record.write_text(text)
    assert Record(hooks.view, "n1").read() is None


def test_where_a_failure_cannot_be_recorded_slurmctld_is_asked(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Record(hooks.view, "n1").update(since_s=1.0) == {}

    def full(path: str, plain: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(cache, "write_private", full)
    Record(hooks.view, "n1").update(["lustre"])
    assert Record(hooks.view, "n1").read() is None


def _update(root: str, check: str, go: object) -> None:
    go.wait(60)  # type: ignore[attr-defined]
    Record(NodeView(root), "n1").update([check])


def test_many_hooks_at_once_record_what_each_found(hooks: Hooks) -> None:
    context = multiprocessing.get_context("fork")
    go = context.Barrier(8)
    names = {f"check-{number}" for number in range(8)}
    some = [context.Process(target=_update, args=(str(hooks.node), name, go)) for name in names]
    for process in some:
        process.start()
    for process in some:
        process.join(60)
    assert [process.exitcode for process in some] == [0] * 8
    assert (Record(hooks.view, "n1").read() or {}).keys() == names
