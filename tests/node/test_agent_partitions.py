"""Four nodes in network namespaces, two of them active: links are cut for real, and no rank ever runs twice."""

import pytest
from agent_harness import QUICK, says, up
from namespaces import Network, unusable
from test_takeover import WRITES, writers

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]


@pytest.fixture
def network():
    with Network(4) as one:
        yield one


def start(rig, network):
    """Agents 0 to 3 of one job. Agents 0 and 1 are active and have written; the others are spares."""
    place = ("--nnodes=2:4", f"--rdzv-endpoint={network.address(0)}:29400", "--rdzv-conf=last_call_timeout=30")
    script, nodes = rig.script(WRITES), []
    for host in range(4):
        rig.prefix = network.inside(host)
        nodes.append(rig.run(script, f"--node-rank={host}", *place, "--max-restarts=3", *QUICK, NVRX_TOKEN="7" * 64))
    for spare in nodes[2:]:
        spare.line("this node is a hot spare")
    assert [up(one, 0)[0] for one in nodes[:2]] == [0, 1]
    for active in nodes[:2]:
        active.monitored()
    return nodes


@pytest.mark.repeats("unplug-hosts1", "deafen", "mute", "separate")
@pytest.mark.parametrize(
    "cut, hosts, stops, spares",  # `stops`: whose ranks end; `spares`: one of them runs these in cycle 1
    [
        ("unplug", {0}, 0, (2, 3)),  # the coordinator alone
        ("unplug", {1}, 1, (2, 3)),  # a minority
        ("separate", {1, 3}, 1, (2,)),  # halves: the coordinator's goes on
        ("deafen", {0}, 0, (2, 3)),  # one way
        ("mute", {0}, 0, (2, 3)),
    ],
)
def test_ranks_of_a_part_that_is_cut_off_end_before_they_run_elsewhere(rig, network, cut, hosts, stops, spares):
    nodes = start(rig, network)
    getattr(network, cut)(hosts)
    stays = nodes[1 - stops]
    spare = says("up 1 group", *(nodes[number] for number in spares))
    assert sorted(up(one, 1)[0] for one in (stays, spare)) == [0, 1]
    network.heal()
    nodes[stops].line("cycle 1: this node is a hot spare")
    rig.ends_well("end1", *nodes)
    assert [len(spans) for spans in writers(rig).values()] == [2, 2]
    assert [one for one in nodes if 1 in one.cycles] == [one for one in nodes if one in (stays, spare)]
    assert rig.result["code"] == 0 and rig.result["restarts_used"] == 1
