"""The coordinator is lost in every phase of the job: another agent takes over, and no rank runs twice."""

import os
import signal

import one_writer
import pytest
from agent_harness import CLIENT, QUICK, UNTIL_TOLD, UP, kill, says, stat, up
from click.testing import CliRunner
from waits import until

from nvrx_slurm.child.descendants import below
from nvrx_slurm.cli.toolbox import main

pytestmark = pytest.mark.process


WRITES = UP + one_writer.worker("", "plain")


def writers(rig):
    """See `one_writer.writers`."""
    return one_writer.writers(rig.dir / "written")


def test_result_and_logs_tell_of_all_terms(rig):
    """Term 1: a rank is killed, then the coordinator's node is lost. Term 2: a rank is killed again."""
    script = rig.script(UNTIL_TOLD)
    first, second, third = rig.nodes(3, "2:3", script, "--max-restarts=5")
    third.line("this node is a hot spare")
    up(first, 0)
    os.kill(up(second, 0)[1], signal.SIGKILL)
    up(second, 1)
    kill(first, up(first, 1)[1])
    up(second, 2)
    os.kill(up(third, 2)[1], signal.SIGKILL)
    assert {up(second, 3)[0], up(third, 3)[0]} == {0, 1}
    rig.ends_well("end3", second, third)
    result = rig.result
    assert (result["code"], result["cycles"], result["restarts_used"], len(result["lost_nodes"])) == (0, 4, 3, 1)
    causes = [restart["cause"] for restart in result["restarts"]]
    assert [word in cause for word, cause in zip(("SIGKILL", "node 0 ", "SIGKILL"), causes, strict=True)] == [True] * 3
    times = [restart["at_s"] for restart in result["restarts"]]
    assert times == sorted(times) and times[0] < result["duration_s"] > times[-1]
    (last,) = [line for line in second.said + third.said if line.startswith("job ends")]
    assert "3 restarts, 1 lost node" in last
    logs = sorted(path.name for path in rig.run_dir.glob("events/coordinator*"))
    assert len(logs) >= 2 and logs[0] == "coordinator.jsonl"  # a contested election may take several terms
    replayed = CliRunner().invoke(main, ["replay", str(rig.run_dir)])
    elections = len(list(rig.run_dir.glob("events/election*")))
    assert replayed.exit_code == 0 and replayed.output.count("the same decisions") == 3 + len(logs) + elections
    assert elections == 3


# Others have these shapes, too: an own session and a first instruction, a daemon, or a real Slurm.
REPEATED = [("stopped", "plain"), *((fault, shape) for fault in ("stopped", "killed") for shape in ("popen", "setsid"))]
CASES = [
    pytest.param(*case, marks=pytest.mark.matrix if case in REPEATED else ())
    for case in (*one_writer.CASES, ("", "popen"))
]


@pytest.mark.repeats("stopped-first", "stopped-spare", "stopped-daemon", "-popen")
@pytest.mark.parametrize("again", one_writer.REPEATS)
@pytest.mark.parametrize("fault, shape", CASES)
def test_all_processes_of_a_rank_end_before_it_runs_elsewhere(rig, fault, shape, again):
    """A node that was stopped is a spare again; "": all of its processes were stopped, as by the freezer."""
    lost, rank = 2 if shape == "spare" else 1, int(not fault)
    script, frozen = rig.script(one_writer.worker(fault, shape)), []
    nodes = rig.nodes(2 + lost, f"2:{2 + lost}", script, "--max-restarts=3", *QUICK)
    if not fault:
        until(lambda: len(writers(rig)) == 2, "both ranks write")
        frozen = [os.pidfd_open(nodes[1].pid), *below(nodes[1].pid, nodes[1].pidfd)]
        for fd in frozen:
            signal.pidfd_send_signal(fd, signal.SIGSTOP)
    until(lambda: len(writers(rig).get(rank, ())) == lost + 1, "the rank runs elsewhere")
    for one in nodes:
        if stat(one.pid)[1] == "T":
            for pid in (one.pid, *one.monitors()):
                os.kill(pid, signal.SIGCONT)
            one.line(f"cycle {lost}: this node is a hot spare")
            assert fault or "stands for coordinator" not in one.text
    for fd in frozen:
        os.close(fd)
    rig.open(f"end{lost}")
    codes = sorted(one.wait() for one in nodes)
    assert codes[1:] == [0] * (1 + lost) and codes[0] == (-9 if fault == "killed" or lost == 2 else 0)
    assert len(writers(rig)[rank]) == lost + 1


@pytest.mark.parametrize(
    "flags, env",
    [((), {"NVRX_INJECT_GPU_FAILURE": "0:0"}), (("--ft-restart-policy=min-healthy", "--max-restarts=3"), {})],
    ids=["no workers", "min-healthy"],
)
def test_the_loss_of_a_coordinator_whose_workers_are_not_missed_costs_no_cycle(rig, flags, env):
    first, *others = nodes = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD), *flags, **env)
    pids = [up(one, 0)[1] for one in (nodes if flags else others)]
    kill(first, *(pids[:1] if flags else ()))
    says("term . carries on with cycle 0", *others)
    rig.ends_well("end0", *others)
    assert [up(one, 0)[1] for one in others] == pids[-2:] and [one.cycles for one in others] == [[0], [0]]
    assert rig.result["code"] == 0 and len(rig.result["restarts"]) == 0


@pytest.mark.matrix
def test_a_coordinator_is_killed_after_ranks_were_warned(rig):
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


# open(2) of a FIFO waits for a reader, as before files of others were opened without waiting.
HANGS = """
import os
from nvrx_slurm.node.workers import workers
from nvrx_slurm.system import owned
workers.OPEN_TIMEOUT_S, append_in = 1.5, owned.append_in
owned.append_in = lambda here, path, *how: os.open(path, os.O_WRONLY) if path.is_fifo() else append_in(here, path, *how)
"""


def test_logs_that_cannot_be_opened_hold_no_agent(rig):
    """A FIFO without a reader stands for a file system that hangs: the rank starts without a log, and once."""
    rig.before = HANGS
    script = rig.script(WRITES + "if CYCLE == 0 and RANK == 0:\n    os._exit(1)\n")
    first, second = rig.nodes(2, "2", script, "--max-restarts=2", *QUICK)
    until(lambda: len(writers(rig)) == 2, "both ranks write")
    directory = next(rig.run_dir.glob("cycle_0/node_1_*"))
    hangs = rig.run_dir / "cycle_1" / directory.name
    hangs.mkdir(parents=True)
    os.mkfifo(hangs / "rank_1.out")
    rig.open("end0")
    second.line("the log file system did not return within 1.5 s: what the workers write is lost in this cycle")
    up(first, 1)
    until(lambda: len(writers(rig)[1]) == 2, "rank 1 writes again")
    rig.ends_well("end1", first, second)
    assert [len(spans) for spans in writers(rig).values()] == [2, 2]
    assert "out of reach" not in first.text and rig.result["restarts_used"] == 1


def test_of_two_nodes_the_survivor_waits_for_another_one_and_no_longer_than_the_join_timeout(rig):
    """The host proves that the coordinator is dead, so the survivor may act alone; it has too few nodes."""
    conf = "--rdzv-conf=join_timeout=2"
    first, second = rig.nodes(2, "2", rig.script(UNTIL_TOLD), "--max-restarts=3", conf)
    pid = up(second, 0)[1]
    kill(first, up(first, 0)[1])
    second.line("1 of at least 2 nodes")
    assert second.wait() == 94 and stat(pid)[1] in ("", "Z")
    assert rig.result["code"] == 94


DIES_AT_THE_END = """
import os, signal
from nvrx_slurm.node.coordination.member_streams import MemberStreams
from nvrx_slurm.types import Finish
send = MemberStreams._send
def die(members, command):
    send(members, command)
    if isinstance(command.message, Finish) and command.node_id != members._local.node_id:
        os.kill(os.getpid(), signal.SIGKILL)
MemberStreams._send = die
"""


def test_a_coordinator_is_killed_while_it_tells_the_end(rig):
    """One node at most has heard of it. The others end alike, after another cycle if no node has."""
    script = rig.script(UP + 'gate("end")')
    rig.before = DIES_AT_THE_END
    first = rig.node(0, "2:3", script, "--max-restarts=3")
    rig.before = ""
    second, third = (rig.node(rank, "2:3", script, "--max-restarts=3") for rank in (1, 2))
    up(first, 0), up(second, 0), third.line("this node is a hot spare")
    rig.open("end")
    assert first.wait() == -signal.SIGKILL
    assert [second.wait(), third.wait()] == [0, 0]
    assert rig.result["code"] == 0
