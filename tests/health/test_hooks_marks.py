"""What the hooks remember of a node that they drained: it is taken back, and only when all that ever failed is well."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
from hooks_harness import Hooks, as_root
from recorded import Node
from test_hooks import wait_for

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.hooks import drain_policy as drain
from nvrx_slurm.slurm.drain import parse_note

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

SHOW = "show node n1 -o"
UNDRAIN = "update NodeName=n1 State=UNDRAIN"
FAILED = {"SLURM_JOB_EXIT_CODE2": "1:0"}
# As slurmctld would: keeps what it is told. Whoever asks waits, with the answer out, while there is a FIFO `hold`.
STATEFUL = """#!/bin/sh
echo "$*" >>{root}/asked
if [ -e {root}/scontrol-fails ]; then exit 1; fi
drained() {{ echo "NodeName=n1 State=IDLE+DRAIN Reason=${{1#Reason=}} [root@2026-11-21T12:00:00]" >{root}/note; }}
case "$1 $3" in
show*) cat {root}/note; if [ -p {root}/hold ]; then read -r word <{root}/hold; fi; exit 0 ;;
*State=DRAIN) drained "$4" ;;
*State=UNDRAIN) echo "NodeName=n1 State=IDLE" >{root}/note ;;
*Reason=*) drained "$3" ;;
esac
"""
# Of the site: fails while there is a file.
OWN = """#!/bin/sh
if [ -e {flag} ]; then echo it stands still; exit 1; fi
echo it turns
"""


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    made = Hooks(tmp_path, dgx)
    (made.root / "scontrol").write_text(STATEFUL.format(root=made.root))
    return made


@pytest.fixture
def fan(hooks: Hooks) -> Path:
    """While it exists the site's own check `fan`, which is the epilog's, fails."""
    flag = hooks.root / "fan-broken"
    script = hooks.root / "fan"
    script.write_text(OWN.format(flag=flag))
    script.chmod(0o755)
    hooks.site(own=[{"name": "fan", "run": [str(script)], "when": ["epilog"]}])
    return flag


def drained(reason: str, states: str = "IDLE+DRAIN", who: str = "root") -> str:
    return f"NodeName=n1 State={states} Reason={reason} [{who}@2026-11-21T12:00:00]"


def note(hooks: Hooks) -> str:
    """The node's state and reason."""
    found = parse_note((hooks.root / "note").read_text())
    return f"{'+'.join(sorted(found.states))} {found.reason.partition(':/')[0]}".strip()


def mark(hooks: Hooks) -> Path:
    return hooks.node / "/run/nvrx-health/drained-n1.json"


# --- it is never forgotten that a drain may be ours -------------------------------------------------------------------


@pytest.mark.parametrize(
    "states",
    ["IDLE+DRAIN+MAINTENANCE+RESERVED", "IDLE*+DRAIN", "MIXED+DRAIN+REBOOT_REQUESTED", "ALLOCATED+DRAIN+FAIL",
     "DOWN+DRAIN", "DOWN", "INVAL+IDLE+DRAIN"],
)  # fmt: skip
def test_a_node_of_ours_is_taken_back_when_whatever_else_it_was_is_over(hooks: Hooks, states: str) -> None:
    hooks.slurm_says(drained("nvrx:lustre:x", states))
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW]
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE" and hooks.asked()[-1] == UNDRAIN


def test_a_drain_while_the_periodic_hook_asks_is_not_forgotten(hooks: Hooks) -> None:
    """It has the answer that the node is in use, and not yet written that down."""
    hold = hooks.root / "hold"
    os.mkfifo(hold)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        periodic = pool.submit(hooks.run, "healthcheck")
        fifo = os.open(hold, os.O_WRONLY)  # until it waits
        hold.unlink()
        hooks.break_lustre()
        assert hooks.run("prolog").code == 1
        assert note(hooks) == "DRAIN+IDLE nvrx:lustre"
        hooks.mend_lustre()
        os.close(fifo)
        assert periodic.result().code == 0
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE", mark(hooks).read_text()


def test_a_drain_that_slurmctld_did_not_confirm_may_still_come(hooks: Hooks) -> None:
    (hooks.root / "scontrol-fails").touch()
    hooks.break_lustre()
    assert hooks.run("prolog").code == 1 and hooks.asked() == [SHOW]
    (hooks.root / "scontrol-fails").unlink()
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert hooks.asked() == [SHOW, SHOW], "in use"
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE"


@pytest.mark.parametrize(
    "line", ["NodeName=n1 State=IDLE", drained("nvrx:lustre:x", who="alice"), drained("a new fan")]
)
def test_what_is_surely_not_ours_is_not_asked_about_again(hooks: Hooks, line: str) -> None:
    """Somebody has resumed the node, or taken it over, long after we drained it."""
    node = NodeView(str(hooks.node.root))
    drain.note_down(node, "n1", ["lustre"])
    plain = json.loads(mark(hooks).read_text())
    mark(hooks).write_text(json.dumps({**plain, "checks": {"lustre": cache.now_s() - drain.SETTLE_S - 1}}))
    hooks.slurm_says(line)
    for _ in range(2):
        hooks.run("healthcheck")
    assert hooks.asked() == [SHOW]


# --- the mark ---------------------------------------------------------------------------------------------------------


def test_the_mark_forgets_only_what_was_before(dgx: Node) -> None:
    node = NodeView(str(dgx.root))
    assert drain.noted(node, "n1") is None, "after a boot nobody knows"
    first = drain.note_down(node, "n1", ["lustre", "fan"])
    both = drain.note_down(node, "n1", ["fan"])
    assert both["lustre"] == first["lustre"] and both["fan"] > first["fan"]
    assert drain.note_down(node, "n1", since_s=both["fan"]) == {"fan": both["fan"]} == drain.noted(node, "n1")
    assert drain.note_down(node, "n1", since_s=cache.now_s() + 1) == {} == drain.noted(node, "n1")
    dgx.write("/proc/sys/kernel/random/boot_id", "another\n")
    assert drain.noted(node, "n1") is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"boot": "x"}', '{"drained": false}', '{"checks": {"a": "b"}}']
)
def test_of_a_mark_that_is_damaged_nothing_is_known(dgx: Node, text: str) -> None:
    node = NodeView(str(dgx.root))
    drain.note_down(node, "n1", since_s=1.0)
    file = dgx / "/run/nvrx-health/drained-n1.json"
    plain = {"boot": cache.boot_id(node), "checks": {}}
    assert json.loads(file.read_text()) == plain
    file.write_text(text if not text.startswith('{"') else json.dumps({**json.loads(text), "boot": plain["boot"]}))
    assert drain.noted(node, "n1") is None


def test_where_a_failure_cannot_be_noted_down_slurmctld_is_asked(dgx: Node) -> None:
    node = NodeView(str(dgx.root))
    assert drain.note_down(node, "n1", since_s=1.0) == {}
    (dgx / "/run/nvrx-health/drained-n1.json.new").mkdir()  # as little can be written there as on a full disk
    drain.note_down(node, "n1", ["lustre"])
    assert drain.noted(node, "n1") is None


def _note_down(root: str, check: str, go: object) -> None:
    go.wait(60)  # type: ignore[attr-defined]
    drain.note_down(NodeView(root), "n1", [check])


def test_many_hooks_at_once_note_down_what_each_found(dgx: Node) -> None:
    context = multiprocessing.get_context("fork")
    go = context.Barrier(16)
    names = {f"check-{number}" for number in range(16)}
    some = [context.Process(target=_note_down, args=(str(dgx.root), name, go)) for name in names]
    for process in some:
        process.start()
    for process in some:
        process.join(60)
    assert [process.exitcode for process in some] == [0] * 16
    assert (drain.noted(NodeView(str(dgx.root)), "n1") or {}).keys() == names


# --- what fails on a node that is drained already ---------------------------------------------------------------------


def drain_for_both(hooks: Hooks, fan: Path) -> None:
    """For lustre, which is well again; then a job's epilog finds the fan broken."""
    hooks.break_lustre()
    hooks.run("prolog")
    assert note(hooks) == "DRAIN+IDLE nvrx:lustre"
    hooks.mend_lustre()
    fan.touch()
    ran = hooks.run("epilog", **FAILED)
    assert ran.code == 0 and "fan: fail: it stands still" in ran.log and "already" in ran.log, ran.log


def test_a_second_failure_is_in_the_reason_and_has_to_be_mended_too(hooks: Hooks, fan: Path) -> None:
    drain_for_both(hooks, fan)
    assert note(hooks) == "DRAIN+IDLE nvrx:lustre,fan"
    mark(hooks).unlink()  # as after a boot
    assert "fan: fail: it stands still" in hooks.run("healthcheck").log
    assert note(hooks) == "DRAIN+IDLE nvrx:lustre,fan"
    fan.unlink()
    assert "taken back: lustre passes again, fan passes again" in hooks.run("healthcheck").log
    assert note(hooks) == "IDLE"


def test_a_second_failure_that_slurmctld_could_not_be_told_has_to_be_mended_too(hooks: Hooks, fan: Path) -> None:
    drain_for_both(hooks, fan)
    hooks.slurm_says(drained("nvrx:lustre:x"))
    assert "fan: fail: it stands still" in hooks.run("healthcheck").log
    assert note(hooks) == "DRAIN+IDLE nvrx:lustre:x"
    fan.unlink()
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE"


def test_what_only_the_epilog_can_judge_keeps_the_node(hooks: Hooks) -> None:
    """A GPU process did not end: no check that passes makes up for it."""
    hooks.slurm_says(drained("nvrx:lustre:x"))
    drain.note_down(NodeView(str(hooks.node.root)), "n1", ["gpu-leftovers"])
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


def test_a_second_failure_of_the_periodic_hook_is_not_forgotten(hooks: Hooks) -> None:
    """It fails, and then does not apply any more: that is no pass."""
    hooks.slurm_says(drained("nvrx:cpu-count:x"))
    hooks.break_lustre()
    hooks.run("healthcheck")
    assert note(hooks) == "DRAIN+IDLE nvrx:cpu-count,lustre:x"
    asked = len(hooks.asked())
    hooks.run("healthcheck")
    assert hooks.asked()[asked:] == [SHOW], "nothing new"
    os.unlink(hooks.node / "/sys/fs/lustre/health_check")
    hooks.run("healthcheck")
    assert UNDRAIN not in hooks.asked()


def test_what_was_before_somebody_resumed_the_node_is_over(hooks: Hooks) -> None:
    node = NodeView(str(hooks.node.root))
    drain.note_down(node, "n1", ["gpu-leftovers"])
    plain = json.loads(mark(hooks).read_text())
    mark(hooks).write_text(json.dumps({**plain, "checks": {"gpu-leftovers": cache.now_s() - drain.SETTLE_S - 1}}))
    hooks.break_lustre()
    hooks.run("prolog")
    hooks.mend_lustre()
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE"


@pytest.mark.parametrize("line", [drained("keep: a fan"), drained("nvrx:lustre:x", who="alice")])
def test_nobody_elses_reason_gets_more_checks(hooks: Hooks, line: str, fan: Path) -> None:
    hooks.slurm_says(line)
    fan.touch()
    hooks.run("epilog", **FAILED)
    assert hooks.asked() == [SHOW]


def test_a_failure_while_the_node_is_taken_back_drains_it_again(hooks: Hooks, fan: Path) -> None:
    """The epilog saw it drained still, and left it at that."""
    script = (hooks.root / "scontrol").read_text()
    epilog = f"{hooks.directory}/epilog"
    env = "SLURMD_NODENAME=n1 SLURM_JOB_ID=7 SLURM_JOB_UID=65534 SLURM_JOB_EXIT_CODE2=1:0"
    during = f'case "$3" in State=UNDRAIN) /usr/bin/env -i {env} {epilog} ;; esac\n'
    (hooks.root / "scontrol").write_text(script.replace('case "$1 $3" in\n', during + 'case "$1 $3" in\n'))
    fan.touch()
    hooks.slurm_says(drained("nvrx:lustre:x"))
    hooks.run("healthcheck")
    assert [line.partition(" Reason=")[0] for line in hooks.asked() if "State=" in line] == [
        UNDRAIN,
        "update NodeName=n1 State=DRAIN",
    ]
    assert note(hooks) == "DRAIN+IDLE nvrx:fan:failed while the node was taken back"


# --- results from before a failure do not count -----------------------------------------------------------------------


@pytest.fixture
def raid(hooks: Hooks) -> Path:
    """While it exists the site's own check `raid` fails, of which results are used again; a prolog's is there."""
    flag = hooks.root / "raid-broken"
    script = hooks.root / "raid"
    script.write_text(OWN.format(flag=flag))
    script.chmod(0o755)
    when = ["prolog", "epilog", "periodic"]
    hooks.site(own=[{"name": "raid", "run": [str(script)], "when": when, "reuse": 300}])
    assert hooks.run("prolog").code == 0
    flag.touch()
    assert hooks.run("prolog").code == 0, "that is what reuse means"
    return flag


@pytest.mark.usefixtures("raid")
def test_after_a_failed_job_only_a_new_look_counts(hooks: Hooks) -> None:
    hooks.run("epilog", **FAILED)
    assert note(hooks) == "DRAIN+IDLE nvrx:raid:it stands still"


@pytest.mark.usefixtures("raid")
def test_a_suspicion_is_verified_by_a_new_look(hooks: Hooks) -> None:
    (hooks.spool / "n1.7.jsonl").write_text('{"v": 1, "kind": "check-failed", "check": "raid", "text": "x"}\n')
    hooks.run("epilog", SLURM_JOB_EXIT_CODE2="0:0")
    assert note(hooks) == "DRAIN+IDLE nvrx:raid:it stands still"
    assert hooks.run("prolog").code == 1, "others know it, too"


def test_a_look_that_had_begun_before_the_job_failed_does_not_count(hooks: Hooks) -> None:
    """A prolog's check has seen that all is well, and is not done yet; the epilog waits for it, then looks itself."""
    flag, hold, script = (hooks.root / name for name in ("raid-broken", "raid-holds", "raid"))
    os.mkfifo(hold)
    holding = f"if [ -p {hold} ]; then read -r word <{hold}; fi"
    script.write_text(OWN.format(flag=flag).replace("echo it turns", f"{holding}\necho it turns"))
    script.chmod(0o755)
    own = {"name": "raid", "run": [str(script)], "when": ["prolog", "epilog"], "reuse": 300, "budget": 50}
    hooks.site(own=[own], deadlines={"prolog": 55, "epilog": 55})
    hooks.add(PROLOG_BUDGET=60, EPILOG_BUDGET=60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        prolog = pool.submit(hooks.run, "prolog")
        fifo = os.open(hold, os.O_WRONLY)  # until it reads
        hold.unlink()
        flag.touch()
        epilog = pool.submit(hooks.run, "epilog", **FAILED)
        lock = (hooks.node / "/run/nvrx-health/raid.lock").stat()
        wait_for(lambda: bool(re.search(rf" -> FLOCK .*:{lock.st_ino} ", Path("/proc/locks").read_text())))
        os.close(fifo)
        assert (prolog.result().code, epilog.result().code) == (0, 0)
    assert note(hooks) == "DRAIN+IDLE nvrx:raid:it stands still"


def test_a_node_is_taken_back_by_a_look_after_the_failure(hooks: Hooks, raid: Path) -> None:
    hooks.slurm_says(drained("nvrx:raid:x"))
    assert "raid: fail: it stands still" in hooks.run("healthcheck").log
    assert note(hooks) == "DRAIN+IDLE nvrx:raid:x"
    raid.unlink()
    hooks.run("healthcheck")
    assert note(hooks) == "IDLE"
