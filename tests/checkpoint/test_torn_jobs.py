"""Jobs in which a save, a send or a load is cut off, or takes too long. Their weights equal those of a calm run."""

import os
import signal
from functools import partial

import pytest
from jobs_harness import FAULT_AT, begins, kept, memory
from test_cgroup import group as group

pytest.importorskip("torch")
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(500)]


def test_a_rank_that_is_killed_in_a_save_of_a_job_with_copies(make, undisturbed):
    """Other ranks are a step further, and their copies, too: all take the iteration that each of them has."""
    job = make("in-a-save", spares=0)
    assert job.end() == undisturbed
    assert "dies 1 0" in job.text
    # The checksum of the last save may not have been compared yet: then it is the one before.
    assert begins(job.text, 1) in ({FAULT_AT}, {FAULT_AT - 1})


def test_a_rank_that_the_kernel_kills_in_a_save_as_memory_ends(make, undisturbed, group):
    job = make("out-of-memory", spares=0, words=(str(group),))
    assert job.end() == undisturbed
    assert "eats 1 0" in job.text and "the limit allows it" not in job.text
    assert begins(job.text, 1) in ({FAULT_AT}, {FAULT_AT - 1})


def test_a_spare_that_is_killed_in_its_first_load(make, undisturbed):
    job = make("in-a-load")
    job.reach_the_fault()
    job.active[1].kill()
    assert job.end(job.active[1]) == undisturbed
    assert "dies 3 1" in job.text
    assert begins(job.text, 2) == {FAULT_AT}


def test_a_node_that_is_lost_in_the_middle_of_a_send(make, undisturbed):
    """Half of a state of 64 MB is there: the one before is taken."""
    job = make("in-a-send")
    receiver, sender = job.active
    job.save(1)
    keeper = receiver.keeper
    for iteration in range(2, FAULT_AT + 1):
        (job.directory / f"save{iteration}").touch()
        job.until(partial(is_torn_or_has, keeper, (3, iteration)), 0.001)
        if is_stopped_in_the_middle(keeper):
            break
        job.save(iteration)
    else:
        raise AssertionError("no send was seen")
    sender.kill()
    os.kill(keeper, signal.SIGCONT)
    assert job.end(sender) == undisturbed
    assert begins(job.text, 1) == {iteration - 1}


def is_torn_or_has(keeper, save):
    return torn(keeper) or save in kept(keeper)


def is_stopped_in_the_middle(keeper):
    os.kill(keeper, signal.SIGSTOP)
    if torn(keeper):
        return True
    os.kill(keeper, signal.SIGCONT)
    return False


def torn(keeper):
    """Whether a state has one iteration at its begin, and another one at its end."""
    end = 8 << 23
    for file in memory(keeper):
        if os.fstat(file.fileno()).st_size > end and os.pread(file.fileno(), 8, 0) != os.pread(file.fileno(), 8, end):
            return True
    return False


def test_copies_that_take_longer_than_the_time_between_two_saves(make, undisturbed):
    """What a lost node costs then is said."""
    job = make("slow")
    job.until(lambda: all(len(one.waits) == 2 for one in job.active))
    job.active[1].kill()
    assert job.end(job.active[1]) == undisturbed
    assert "take longer than saves" in job.text
    (begin,) = begins(job.text, 1)
    line = f"iteration {begin} is in memory for all ranks" if begin else "the disk has to do"
    assert line in job.text
