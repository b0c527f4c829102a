"""Several nodes on loopback: lost, silent, late and returning agents; one end for all."""

import json
import signal
import socket

import pytest
from agent_harness import QUICK, UNTIL_TOLD, UP, kill, up
from stage import free_port

pytestmark = pytest.mark.process


def test_two_nodes_form_one_world_also_without_ranks_and_have_logs_of_their_own(rig):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    script = rig.script("say(json.dumps(dict(os.environ)))")
    place = ("--nnodes=2:2", f"--rdzv-endpoint=127.0.0.1:{rig.port}", "--rdzv-id=unranked", "--nproc-per-node=2")
    both = [rig.run(script, *place) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    told = [json.loads(rig.log(0, rank, "out")) for rank in range(4)]
    assert [[t[n] for n in names] for t in told] == [
        ["0", "0", "4", "2", "0", "2"], ["1", "1", "4", "2", "0", "2"],
        ["2", "0", "4", "2", "1", "2"], ["3", "1", "4", "2", "1", "2"],
    ]  # fmt: skip
    assert len({(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told}) == 1 and told[0]["MASTER_ADDR"] == "127.0.0.1"
    agents = {path.stem.removeprefix("agent_") for path in rig.run_dir.glob("events/agent_*.jsonl")}
    nodes = {path.name.removeprefix("node_") for path in rig.run_dir.glob("cycle_0/node_*")}
    assert agents == nodes and len(nodes) == 2 and "-1" not in agents


def test_exhausted_budget_ends_all_nodes_with_1_and_one_first_cause(rig):
    script = rig.script(UP + "def inner():\n    raise OSError('disk on fire')\nif RANK == 2:\n    inner()\nforever()")
    nodes = rig.nodes(3, "3", script, "--max-restarts=2")
    assert [one.wait() for one in nodes] == [1, 1, 1]
    assert [one.text.count("first cause:") for one in nodes] == [1, 0, 0]
    cause = nodes[0].text.rpartition("first cause:")[2]
    assert "rank_2.err" in cause and "Traceback (most recent call last)" in cause and "in inner" in cause
    why = rig.result
    assert (why["code"], why["first_cause"]["rank"], why["first_cause"]["exit_code"]) == (1, 2, 1)
    assert "rank 2 " in cause and "on node 2 (" in cause and cause.rstrip().endswith("OSError: disk on fire")
    assert "restart 1 of 2" in nodes[0].text and "restart 2 of 2" in nodes[0].text
    for one in nodes[1:]:
        last = one.said[-1]
        assert "ends with code 1: rank 2 " in last and "all 2 restarts are used" in last


def test_lost_node_is_replaced_by_the_spare_and_may_come_back(rig):
    """Group rank 1 of 3 is lost: 0 and 2 stay what they are, the spare takes the gap; then the same again."""
    script = rig.script(UNTIL_TOLD)
    first, second, third, spare = rig.nodes(4, "3:4", script, "--max-restarts=5")
    spare.line("this node is a hot spare")
    assert [up(one, 0)[0] for one in (first, second, third)] == [0, 1, 2]
    kill(second, up(second, 0)[1])
    assert [up(one, 1)[0] for one in (first, spare, third)] == [0, 1, 2]
    back = rig.node(1, "3:4", script, "--max-restarts=5")
    back.line("this node is a hot spare")
    kill(spare, up(spare, 1)[1])
    assert [up(one, 2)[0] for one in (first, back, third)] == [0, 1, 2]
    rig.ends_well("end2", first, back, third)
    assert "restart 2 of 5" in first.text and "restart 3 of 5" not in first.text


def test_of_two_nodes_the_coordinator_goes_on_alone_where_it_is_enough(rig):
    first, second = rig.nodes(2, "2", rig.script(UNTIL_TOLD), "--max-restarts=3", *QUICK)
    up(first, 0), up(second, 0)
    first.signal(signal.SIGSTOP)
    second.line("the lease of this node is over")
    first.signal(signal.SIGCONT)
    assert (up(first, 1)[0], up(second, 1)[0]) == (0, 1)
    rig.ends_well("end1", first, second)


@pytest.mark.matrix
def test_a_late_node_finds_the_coordinator_by_any_endpoint(rig):
    """Node 0 never comes up. The node of the second endpoint coordinates; a late node asks there."""
    place = [f"127.0.0.1:{rig.port}", f"127.0.0.1:{free_port()}"]
    flags = (
        "--nnodes=2:3",
        f"--rdzv-endpoint={','.join(place)}",
        "--rdzv-conf=last_call_timeout=0.1",
        "--max-restarts=3",
    )
    script = rig.script(UNTIL_TOLD)
    second, third = [rig.run(script, f"--node-rank={rank}", *flags) for rank in (1, 2)]
    assert (up(second, 0)[0], up(third, 0)[0]) == (0, 1)
    late = rig.run(script, "--node-rank=0", *flags)  # at the first endpoint
    late.line("this node is a hot spare")
    kill(second, up(second, 0)[1])
    later = rig.run(script, "--node-rank=1", *flags)
    later.line("this node is a hot spare")
    rig.ends_well("end1", third, late, later)


def test_a_job_that_never_meets_ends(rig):
    script = rig.script("forever()")
    one = rig.node(0, "3:4", script, "--rdzv-conf=join_timeout=2,last_call_timeout=0.1")
    assert one.wait() == 94
    assert "code 94: 2 s (join timeout) are over; 1 of at least 3 nodes are" in one.said[-1]
    other = rig.node(1, "3:4", script, "--rdzv-conf=join_timeout=1")
    assert other.wait() == 96
    assert "no coordinator could be reached within 1 s (join timeout); last try: 127.0.0.1:" in other.said[-1]


def test_second_agent_of_a_node_replaces_the_first(rig):
    script = rig.script(UNTIL_TOLD)
    first, old = rig.nodes(2, "2", script, "--max-restarts=3")
    up(first, 0), up(old, 0)
    new = rig.node(1, "2", script, "--max-restarts=3")
    assert old.wait() == 95
    assert "a newer agent of node" in old.said[-1]
    assert (up(first, 1)[0], up(new, 1)[0]) == (0, 1)
    rig.ends_well("end1", first, new)


def test_stranger_with_another_token_or_job_is_refused(rig):
    script = rig.script(UNTIL_TOLD)
    good = {"NVRX_TOKEN": "a" * 64}
    first, second = rig.nodes(2, "2:3", script, "--rdzv-conf=last_call_timeout=0.1", **good)
    up(first, 0), up(second, 0)
    conf = "--rdzv-conf=join_timeout=2"
    wrong = rig.node(2, "2:3", script, conf, NVRX_TOKEN="b" * 64)
    other = rig.node(2, "2:3", script, conf, "--rdzv-id=another", **good)
    wrong.line("is not our coordinator: .*does not hold this job's token")
    other.line("is not our coordinator: .*belongs to another job")
    assert [wrong.wait(), other.wait()] == [96, 96]
    first.line("refused a connection")
    rig.ends_well("end0", first, second)
    everything = first.text + second.text + wrong.text + other.text
    logs = "".join(path.read_text() for path in rig.logs.rglob("*") if path.is_file())
    assert "a" * 64 not in everything + logs and "b" * 64 not in everything + logs


def test_port_of_the_coordinator_taken_by_somebody_else(rig):
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", rig.port))
        foreign.listen()
        one = rig.node(0, "2", rig.script("forever()"))
        assert one.wait() == 2  # wrong input: nothing was started
    last = one.said[-1]
    assert f"cannot listen on 127.0.0.1: ports {rig.port} are taken" in last and "--rdzv-endpoint" in last


def test_master_port_is_fresh_per_cycle_and_can_be_listened_on(rig):
    script = rig.script("""
        import socket
        port = int(os.environ["MASTER_PORT"])
        socket.create_server((os.environ["MASTER_ADDR"], port))  # sets SO_REUSEADDR, as torch's TCPStore does
        say("served", port)
        os._exit(CYCLE < 2)
    """)
    rig.ran(script, "--max-restarts=2", "--ft-crash-loop-backoff=0")
    ports = [rig.log(cycle, 0, "out").split()[1] for cycle in range(3)]
    assert ports[0] != ports[1] != ports[2]
