"""The coordinator is lost in every phase of the job: another agent takes over, and no rank runs twice."""

from __future__ import annotations

import signal
import textwrap
from collections import defaultdict

from agent_harness import CLIENT, QUICK, UNTIL_TOLD, UP, Rig, kill, says, stat, until, up

# Each rank writes time, rank and pid all the time, until the gate of its cycle is open.
WRITES = (
    UP
    + """
with open("written", "a", buffering=1) as file:
    while not os.path.exists(f"end{CYCLE}"):
        file.write(f"{time.monotonic_ns()} {RANK} {os.getpid()}\\n")
        time.sleep(0.002)
"""
)


def writers(rig: Rig) -> dict[int, list[tuple[int, int]]]:
    """By rank: the first and last time of each of its processes, in order; the test fails where they overlap."""
    lives: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in (rig.dir / "written").read_text().splitlines():
        at_ns, rank, pid = map(int, line.split())
        lives[rank][pid].append(at_ns)
    found = {rank: sorted((min(times), max(times)) for times in of.values()) for rank, of in lives.items()}
    for spans in found.values():
        assert all(before[1] < after[0] for before, after in zip(spans, spans[1:], strict=False)), found
    return found


def test_two_coordinators_are_killed_one_after_the_other(rig: Rig) -> None:
    script = rig.script(UNTIL_TOLD)
    first, second, third, fourth = rig.nodes(4, "2:4", script, "--max-restarts=5")
    third.line("this node is a hot spare"), fourth.line("this node is a hot spare")
    up(second, 0)
    kill(first, up(first, 0)[1])
    assert [up(second, 1)[0], up(third, 1)[0]] == [1, 0]
    kill(second, up(second, 1)[1])
    assert {up(third, 2)[0], up(fourth, 2)[0]} == {0, 1}
    rig.open("end2")
    assert [third.wait(), fourth.wait()] == [0, 0]
    assert rig.result["code"] == 0 and len(list(rig.dir.rglob("result.json"))) == 1
    assert rig.result["restarts_used"] == 2


def test_ranks_of_a_silent_coordinator_end_before_they_start_elsewhere(rig: Rig) -> None:
    """Its monitors kill them; it returns as a spare."""
    script = rig.script(WRITES)
    first, second, spare = rig.nodes(3, "2:3", script, "--max-restarts=3", *QUICK)
    spare.line("this node is a hot spare")
    old = up(first, 0)[1]
    until(first.monitors, "its rank is monitored")
    up(second, 0)
    first.signal(signal.SIGSTOP)
    assert {up(second, 1)[0], up(spare, 1)[0]} == {0, 1}
    assert stat(old)[1] == "Z"  # its parent is stopped, and cannot reap it
    first.signal(signal.SIGCONT)
    first.line("this node is a hot spare")
    rig.open("end1")
    assert [first.wait(), second.wait(), spare.wait()] == [0, 0, 0]
    assert [len(spans) for spans in writers(rig).values()] == [2, 2]


def test_the_loss_of_a_coordinator_without_workers_costs_no_cycle(rig: Rig) -> None:
    first, second, third = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD), NVRX_INJECT_GPU_FAILURE="0:0")
    pids = up(second, 0)[1], up(third, 0)[1]
    kill(first)
    says("term . carries on with cycle 0", second, third)
    rig.open("end0")
    assert [second.wait(), third.wait()] == [0, 0]
    assert (up(second, 0)[1], up(third, 0)[1]) == pids and second.cycles == third.cycles == [0]
    assert rig.result["code"] == 0 and rig.result["restarts"] == []


def test_node_0_of_a_step_never_comes_up(rig: Rig) -> None:
    nodes = rig.step((1, 2, 3), 4, "2:4", rig.script(UNTIL_TOLD), "--rdzv-conf=last_call_timeout=0.1")
    says("cycle 0: 2 active and 1 spare nodes", *nodes)
    rig.open("end0")
    assert [one.wait() for one in nodes] == [0, 0, 0]
    assert rig.result["code"] == 0


def test_a_coordinator_is_killed_while_nodes_gather(rig: Rig) -> None:
    """The last node comes after that."""
    script, flags = rig.script(UNTIL_TOLD), ("--rdzv-conf=last_call_timeout=30", "--max-restarts=1")
    first, second, third = rig.step((0, 1, 2), 4, "3:4", script, *flags)
    says("3 of 4 nodes", first)
    kill(first)
    (late,) = rig.step((3,), 4, "3:4", script, *flags)
    assert sorted(up(one, 0)[0] for one in (second, third, late)) == [0, 1, 2]
    rig.open("end0")
    assert [one.wait() for one in (second, third, late)] == [0, 0, 0]


def test_a_coordinator_is_killed_while_ranks_stop_after_a_fault(rig: Rig) -> None:
    """The ranks of the others end only after the takeover."""
    stubborn = """
        if CYCLE == 0:
            signal.signal(signal.SIGTERM, lambda *_: say("stopping", RANK))
            if RANK == 2:
                gate("fail")
                os._exit(1)
            gate("stopped")
            os._exit(1)
    """
    script = rig.script(UP + textwrap.dedent(stubborn) + 'gate("end")')
    first, second, third, spare = rig.nodes(4, "3:4", script, "--max-restarts=5")
    pids = [up(one, 0)[1] for one in (first, second, third)]
    rig.open("fail")
    second.line("stopping 1")
    kill(first, pids[0])
    says("term . stands|stands for coordinator", second, third, spare)
    rig.open("stopped"), rig.open("end")
    assert [one.wait() for one in (second, third, spare)] == [0, 0, 0]
    assert (rig.result["code"], rig.result["first_cause"]) == (0, None)


def test_a_coordinator_is_killed_during_a_drain(rig: Rig) -> None:
    """The job was ended by a signal: the others end with its code, and one of them writes the result."""
    script = rig.script(UP + 'signal.signal(signal.SIGTERM, lambda *_: say("saving", RANK))\ngate("saved")')
    nodes = first, second, third = rig.nodes(3, "3", script, "--max-restarts=5")
    pids = [up(one, 0)[1] for one in nodes]
    second.signal(signal.SIGTERM)
    third.line("saving 2")
    kill(first, pids[0])
    rig.open("saved")
    assert [second.wait(), third.wait()] == [143, 143]
    assert rig.result["code"] == 143


def test_a_coordinator_is_killed_after_ranks_were_warned(rig: Rig) -> None:
    """The ranks of the next cycle are warned, too; the job ends with the code of the warning."""
    script = rig.script(
        CLIENT + UP + "while not client.should_stop():\n    time.sleep(0.01)\nsay('saves', CYCLE)\ngate('saved')"
    )
    first, second, spare = rig.nodes(3, "2:3", script, "--max-restarts=5")
    spare.line("this node is a hot spare")
    pid = up(first, 0)[1]
    second.signal(signal.SIGUSR1)
    second.line("saves 0"), first.line("saves 0")
    kill(first, pid)
    second.line("saves 1"), spare.line("saves 1")
    rig.open("saved")
    assert [second.wait(), spare.wait()] == [138, 138]
    assert rig.result["code"] == 138
