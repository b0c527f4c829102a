"""The runner with checks that hang, crash, chatter and leave things behind; mounts that really hang."""

import os
import signal
import threading
import time

import pytest
from recorded import LUSTRE, HungMount, N, P, U, ended
from waits import WAIT_S

from nvrx_slurm.child import bounded_process, descendants
from nvrx_slurm.health import runner
from nvrx_slurm.health.check import Check, NodeView
from nvrx_slurm.system.hardware import Absent

pytestmark = pytest.mark.process


def check(gather, name="one", **more):
    """A check that passes when `gather` returns."""
    return Check(name, "nothing", "Never.", lambda node, expected: (P, str(gather(node, expected))), **more)


def run(*checks, deadline_s=WAIT_S, root="/"):
    """All of it; afterwards no child of it is left."""
    before = set(bounded_process.own)
    result = runner.run(checks, NodeView(root, {}), {}, deadline_s)
    assert bounded_process.own == before
    return result


def forever(node, expected):
    node.doing("reading /lustre/a b")
    threading.Event().wait()


def raises(error):
    def gather(node, expected):
        raise error

    return gather


@pytest.mark.parametrize(
    "gather, verdict, text",
    [
        (lambda node, expected: "fine", P, "fine"),
        (raises(Absent("no such thing")), N, "no such thing"),
        (raises(OSError(5, "Input/output error", "/x")), U, "/x: Input/output error"),
        (raises(ValueError("/y holds junk")), U, "/y holds junk"),
        (raises(KeyError("z")), U, "KeyError: 'z'"),
        (lambda node, expected: os.kill(os.getpid(), signal.SIGKILL), U, "ended without an answer"),
        (lambda node, expected: "a\n\x1b[31m" + "b" * 9999, P, "a ?[31m" + "b" * 390 + "..."),
        (lambda node, expected: "junk verdict", U, "is not a valid Verdict"),
    ],
)
def test_whatever_a_check_does_is_a_finding(gather, verdict, text):
    one = check(gather)
    if text == "is not a valid Verdict":
        one = one._replace(examine=lambda node, expected: ("well", "x"))
    (finding,) = run(one).findings
    assert finding.verdict is verdict
    assert text in finding.text


def test_one_that_hangs_is_named_with_what_it_reads_and_the_others_are_not_held_up():
    hung = check(forever, "hung", budget_s=0.3, on_unknown="drain")
    started_s = time.monotonic()
    result = run(check(lambda n, e: 1, "a"), hung, check(lambda n, e: 2, "b"))
    assert time.monotonic() - started_s < WAIT_S / 2
    assert [(f.check, f.verdict, f.action) for f in result.findings] == [
        ("a", P, ""),
        ("hung", U, "drain"),
        ("b", P, ""),
    ]
    assert result.findings[1].text == "timed out after 0.3 s, reading /lustre/a b"
    assert result.findings[1].seconds >= 0.3


def group(*gathers, **more):
    """Checks that share a child: "0", "1", ..."""
    return [check(gather, str(at), group="one", **more) for at, gather in enumerate(gathers)]


def pid(node, expected):
    return os.getpid()


@pytest.mark.parametrize(
    "bad, text",
    [
        (forever, "timed out after 1.0 s, reading /lustre/a b"),
        (lambda node, expected: os.kill(os.getpid(), signal.SIGKILL), "its process ended without an answer"),
    ],
)
def test_what_is_stuck_in_a_group_hides_no_other(bad, text):
    """Also where all others could not be done any more when its own time is up."""
    found = run(*group(pid, bad, pid, bad, pid, budget_s=1.0), deadline_s=WAIT_S).findings
    assert [f.verdict for f in found] == [P, U, P, U, P]
    assert [found[at].text for at in (1, 3)] == [text, text]
    hung = run(*group(pid, forever, pid, budget_s=WAIT_S), deadline_s=1.0).findings
    assert [f.verdict for f in hung] == [P, U, P]


def test_a_check_that_takes_its_time_has_it_and_those_behind_it_do_not_wait():
    def slow(node, expected):
        threading.Event().wait(3 * runner._PROMPT_S)
        return "slow"

    found = run(*group(slow, pid, pid)).findings
    assert [f.verdict for f in found] == [P] * 3
    assert found[0].text == "slow" and found[1].text == found[2].text
    assert found[0].seconds > 2 * runner._PROMPT_S  # its start is seen later on a loaded machine
    assert found[1].seconds < 3 * runner._PROMPT_S


def test_what_a_check_did_is_not_told_of_the_next_one():
    silent = lambda node, expected: threading.Event().wait()  # noqa: E731
    found = run(*group(lambda node, expected: node.doing("reading /x"), silent, budget_s=0.5)).findings
    assert found[1].text == "timed out after 0.5 s"


def test_a_group_that_cannot_go_on_is_a_finding(monkeypatch):
    forks = iter([os.fork])

    def once():
        for fork in forks:
            return fork()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", once)
    found = run(*group(pid, lambda node, expected: os._exit(0), pid, pid)).findings
    assert [f.verdict for f in found] == [P] + [U] * 3
    assert found[3].text == "no process could be started for it: Resource temporarily unavailable"


def test_what_could_not_begin_before_the_deadline_is_said():
    many = [forever] * 30
    found = run(*group(*many, budget_s=WAIT_S), deadline_s=1.0).findings
    assert len(found) == 30 and {f.verdict for f in found} == {U}
    assert found[0].text.startswith("timed out after ") and found[-1].text == "timed out before it could begin"


@pytest.fixture
def fifo(dgx):
    """In the place of the file that the check `lustre` reads: its child opens it, and only then can we."""
    dgx.remove(LUSTRE)
    os.mkfifo(dgx / LUSTRE)
    return dgx / LUSTRE


def test_sigterm_ends_the_program_and_its_checks(dgx, fifo):
    """slurmd ends a prolog that is too slow, the agent one that it needs no more."""
    site = dgx.site(checks={"lustre": {"budget": 600}})  # not given up before the signal on a busy machine
    process = dgx.start("--only", "lustre", "--deadline", "600", "--config", site)
    writer = os.open(fifo, os.O_WRONLY)
    (pid,) = descendants.children(process.pid)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    os.close(writer)
    assert process.returncode == 128 + signal.SIGTERM
    assert ended(pid)


def test_checks_end_themselves_when_the_program_was_killed(dgx, fifo):
    process = dgx.start("--only", "lustre", "--deadline", "0.5")
    writer = os.open(fifo, os.O_WRONLY)
    children = descendants.children(process.pid)
    process.kill()
    process.communicate(timeout=WAIT_S)
    assert children, "it had ended before it was killed"
    assert all(map(ended, children))
    os.close(writer)


def test_one_that_is_blocked_in_the_kernel_is_said_and_left(tmp_path):
    mount = HungMount(tmp_path)

    def looks(node, expected):
        os.close(mount._fd)  # else nobody could let it go
        return os.listdir(tmp_path)

    taker = threading.Thread(target=mount.take, daemon=True)
    taker.start()
    before = descendants.children(os.getpid())
    try:
        started_s = time.monotonic()
        result = runner.run([check(looks, budget_s=1.0)], NodeView("/", {}), {}, WAIT_S)
        took_s = time.monotonic() - started_s
        taker.join(WAIT_S)
        assert not taker.is_alive(), "nobody asked"
    finally:
        mount.close()  # lets it go
    for pid in set(descendants.children(os.getpid())).difference(before):
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert len(result.notes) == 1 and "1 check process(es)" in result.notes[0]
    assert took_s < WAIT_S / 2
