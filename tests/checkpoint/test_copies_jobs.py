"""Nodes, keepers and bits are lost, and the weights are the same.

All ranks wait in C when a fault comes, as in a collective, and each keeper has the copies of the last iteration.
"""

import pytest
from jobs_harness import FAULT_AT, begins

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]


def lost_node(job):
    job.active[1].kill()
    return [job.active[1]]


def lost_coordinator(job):
    job.active[0].kill()
    return [job.active[0]]


def killed_agent(job):
    """Its keeper lives on for a while."""
    job.active[1].process.kill()
    return [job.active[1]]


def killed_rank(job):
    job.active[1].kill_rank()
    return []


def killed_keeper(job):
    """A rank of that node is killed, too."""
    job.active[1].kill_keeper()
    job.active[1].kill_rank()
    return []


def killed_keeper_of_the_rest(job):
    """The keeper of one node and a rank of the other."""
    job.active[1].kill_keeper()
    job.active[0].kill_rank()
    return []


FAULTS = [lost_node, lost_coordinator, killed_agent, killed_rank, killed_keeper, killed_keeper_of_the_rest]


@pytest.mark.repeats("killed_agent", "killed_rank", "killed_keeper_of_the_rest")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_a_fault_costs_no_more_than_the_step_that_ran(make, undisturbed, fault):
    job = make()
    lost = fault(job)
    assert job.end(*lost) == undisturbed
    assert begins(job.text, 0) == {0} and begins(job.text, 1) == {FAULT_AT}
    assert f"iteration {FAULT_AT} is in memory for all ranks" in job.text
    assert ("another one starts" in job.text) == ("keeper" in fault.__name__)


@pytest.mark.matrix
def test_ranks_that_hang_cost_no_more(make, undisturbed):
    job = make("hang", spares=0, flags=("--ft-rank-heartbeat-timeout=1",))
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {FAULT_AT} and "hang" in job.text


def test_two_partners_that_are_lost_at_once_lead_to_the_disk(make, undisturbed):
    """There is none: the training begins anew."""
    job = make(spares=2)
    job.active[1].kill(), job.active[0].kill()
    assert job.end(*job.active) == undisturbed
    assert begins(job.text, 1) == {0}


def test_a_rank_and_the_node_of_its_copy_cost_no_more(make, undisturbed):
    """The rank's own memory is left."""
    job = make()
    job.active[0].kill_rank(), job.active[1].kill()
    assert job.end(job.active[1]) == undisturbed
    assert begins(job.text, 1) == {FAULT_AT}


def test_two_coordinators_that_are_lost_one_after_another(make, undisturbed):
    """The second spare gets the saves of both cycles before it."""
    job = make("told", spares=2)
    lost = lost_coordinator(job)
    job.reach_the_fault(cycle=1)
    lost += lost_node(job)
    assert job.end(*lost) == undisturbed
    assert begins(job.text, 1) == {FAULT_AT} and begins(job.text, 2) == {FAULT_AT + 1}


def test_fewer_ranks_go_on_from_the_disk(make):
    """There is none: they end as ranks of a job that never had more."""
    job = make(spares=0, flags=("--nnodes=1:2", "--ft-restart-policy=min-healthy"))
    job.active[1].kill(), job.active[0].kill_rank()
    weights = job.end(job.active[1])
    assert begins(job.text, 1) == {0} and "is of 4 ranks, not of 2" in job.text
    assert weights == make("none", active=1, spares=0).end()


OWN, COPIES = range(2, 4), range(2)  # ranks whose states the second node has


def test_bits_that_flip_on_one_node_are_mended_from_its_partner(make, undisturbed):
    job = make()
    assert job.active[1].flip() == 8  # two of each rank
    job.active[1].kill_rank()
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {FAULT_AT}
    assert "is damaged here" in job.text and "was fetched" in job.text


@pytest.mark.matrix
def test_bits_that_flip_in_the_newest_of_both_cost_one_save_more(make, undisturbed):
    job = make()
    assert [one.flip(OWN, [FAULT_AT]) for one in job.active] == [2, 2]
    job.active[1].kill_rank()
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {FAULT_AT - 1}
    assert "is damaged here" in job.text and "cannot be fetched" in job.text


@pytest.mark.matrix
def test_bits_that_flip_in_the_copies_of_a_lost_node_cost_one_save_more(make, undisturbed):
    job = make("slow-saves")
    for iteration in range(1, FAULT_AT + 1):
        job.save(iteration)
    assert job.active[1].flip(COPIES, [FAULT_AT]) == 2
    assert job.end(*lost_coordinator(job)) == undisturbed
    assert begins(job.text, 1) == {FAULT_AT - 1} and "cannot be fetched" in job.text


@pytest.mark.matrix
def test_bits_that_flip_everywhere_lead_to_the_disk(make, undisturbed):
    job = make()
    for one in job.active:
        one.flip()
    job.active[1].kill_rank()
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {0}
    assert "is damaged here" in job.text and "cannot be fetched" in job.text
