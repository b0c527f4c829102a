"""Process groups, several calls, and what users do with the wrapper besides failing."""

import pytest
import torch.distributed as dist
from test_wrapper_faults import HANGS, MEET, QUICK, log, train

pytestmark = pytest.mark.process


def start(job, scenario, world_size, **arguments):
    return job.start(scenario, world_size, **{"times": MEET, **arguments})


def of_all(job, rank, event, *names):
    return [tuple(one[name] for name in names) for one in job.of(rank, event)]


def test_a_process_group_from_the_environment_works_in_every_iteration(job):
    """LOCAL_RANK adds the hardware checks; hardware that is not there fails nothing, and is no news."""
    victims = [0, 1]
    start(job, "gloo", 4, victims=victims, env={"LOCAL_RANK": "0"})
    survivors = [rank for rank in range(4) if rank not in victims]
    job.all_return(survivors)
    for rank in survivors:
        assert of_all(job, rank, "reduced", "total") == [(4.0 - n,) for n in range(len(victims) + 1)]
        assert "not applicable" not in job.err(rank).read_text()


def test_after_the_wrapper_everything_is_as_before(job):
    """And before it: a group of the user's own, or a wrapped function in another one, is refused."""
    start(job, "after_the_wrapper", 2)
    assert set(job.await_all().values()) == {0}
    for rank in range(2):
        assert job.await_event(rank, "environment")["same"]
        assert job.await_event(rank, "threads")["names"] == ["MainThread"]
        assert of_all(job, rank, "hooked", "iteration", "at_start", "wrapped") == [(n, True, True) for n in range(3)]
        assert of_all(job, rank, "returned", "value") == [(2.0,), ("second",)]
        early, nested = (event["chain"][0] for event in job.of(rank, "raised"))
        assert early.startswith("RuntimeError") and "init_process_group" in early
        assert nested.startswith("RestartAbort") and "only one" in nested
    job.await_nothing_left()


@pytest.mark.parametrize(
    "how, victim, shift, why",
    [
        ("raise", 0, 0, "exception: ValueError: fault of rank 0"),  # the others' torch connects where nothing listens
        ("sigkill", 2, 1, "terminated: "),  # this one is rank 0 of iteration 0, too
    ],
)
def test_a_rank_that_fails_before_the_others_have_met_counts_as_they_do(job, how, victim, shift, why):
    """torch numbers groups: with one group there and none here, the ranks would not meet any more."""
    start(job, "fails_before_meeting", 3, victim=victim, how=how, shift=shift)
    alive = [rank for rank in range(3) if rank != victim or how == "raise"]
    job.all_return(alive, value=float(len(alive)))
    for rank in alive:
        assert of_all(job, rank, "entered", "iteration", "groups") == [(0, 0), (1, 0)]
        assert f"iteration 0 was interrupted: rank {victim}: {why}" in job.err(rank).read_text()


def test_the_first_rank_hangs_before_it_serves_the_process_groups_store(job, tmp_path):
    """The others are free before their own hard timeout, which is the same."""
    times = {**MEET, **HANGS, "soft_timeout": 1.0, "hard_timeout": 4.0}
    start(job, "fails_before_meeting", 3, victim=0, how="gil", times=times)
    job.all_return([1, 2], value=2.0)
    assert job.await_end(0) < 0
    assert "fallback server listens" in log(tmp_path, 0)


@pytest.fixture
def agent(job):
    """The store of torchrun's agent: at MASTER_PORT before the ranks, and after them."""
    return dist.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)


def test_torchruns_second_start_works_in_the_store_of_the_first(job, agent):
    for count, faults, end, code in (("0", [{0: "raise", 1: "raise"}], "raised", 1), ("1", [], "returned", 0)):
        train(job, 2, *faults, tries=1, times=MEET, env={"TORCHELASTIC_RESTART_COUNT": count})
        job.await_events(range(2), end)
        assert job.await_all() == {0: code, 1: code}
        job.await_nothing_left()


def test_many_restarts_leave_nothing_behind(job):
    """For keys in the store see test_leader."""
    rounds = 20
    start(job, "many_restarts", 2, rounds=rounds)
    for rank in range(2):
        half, full = (job.await_event(rank, "held", iteration=n) for n in (rounds // 2, rounds))
        for what in ("fds", "threads", "monitor_fds", "children", "objects"):
            assert half[what] == full[what], what
        assert full["objects"] == 1 and full["threads"] <= 1 + 3
    job.all_return(range(2))


@pytest.mark.parametrize("scenario, said", [("cleans_up", ["cleaning", "cleaned"]), ("atomic", ["whole"])])
def test_what_the_function_has_begun_is_finished(job, scenario, said):
    """Its clean-up when it ends by itself; an atomic block, and no other is begun."""
    start(job, scenario, 2)
    job.all_return(range(2))
    assert [event["event"] for event in job.events[0]] == ["entered", *said, "entered", "returned"]


def test_hang_protection_can_be_switched_off(job):
    times = {**QUICK, "soft_timeout": 0.3, "hard_timeout": 0.5, "heartbeat_interval": 0.4, "heartbeat_timeout": 20.0}
    start(job, "unprotected", 1, times=times)
    job.all_return([0], value=0)
