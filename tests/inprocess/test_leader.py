"""One rank computes for all: assignments that need all ranks, as threads, over a store in memory and one of torch's."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_store import MemoryStore
from nvrx_slurm.core.inprocess.tree import Topology, active_order, healthy
from nvrx_slurm.inprocess import rank_assignment as ra
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded, RestartAbort, TimeoutError
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.rank_assignment import Leadership, text_of
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store.barriers import RankLost

pytestmark = pytest.mark.process


BOUND_S = 30.0  # for a test that would hang
SHORT = timedelta(seconds=1)  # long enough for a loaded machine to start the threads


def in_memory():
    return MemoryStore().iteration


@pytest.fixture(params=["memory", "torch"])
def views(request):
    """The tests of the wrapper have a TCPStore, as the wrapper hands it out."""
    if request.param == "memory":
        return in_memory()
    shared = pytest.importorskip("torch.distributed").HashStore()  # without `stable`
    return lambda _: shared


class Ranks:
    """A job: `states` and `plugins` by initial rank, of those who are left."""

    def __init__(self, size, views, make):
        self.views = views
        self.states = {rank: State(rank=rank, world_size=size) for rank in range(size)}
        self.plugins = {rank: ra.with_defaults(make()) for rank in range(size)}
        self.iteration = 0

    def assign(self, died=(), absent=()):
        """The next iteration, after the initial ranks `died`; the `absent` die without a word. What ranks raised."""
        self.before = {rank: replace(state) for rank, state in self.states.items()}
        terminated = {self.states.pop(rank).rank for rank in died}
        raised = {}
        found = {}

        def one(rank):
            ctx = ra.RankAssignmentCtx(self.states[rank], self.views(self.iteration), terminated)
            try:
                found[rank] = ra.assign(self.plugins[rank], ctx)
            except BaseException as error:
                raised[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in self.states if rank not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "a rank hangs"
        found.update({rank: self.states[rank] for rank in absent})
        self.states = {rank: found[rank] for rank in sorted(found)}
        self.iteration += 1
        for state in self.states.values():
            state.advance()
        return raised

    @property
    def active(self):
        """Initial rank of each active rank."""
        by_active = {s.active_rank: rank for rank, s in self.states.items() if s.active_rank is not None}
        assert sorted(by_active) == list(range(len(by_active)))
        return [by_active[active] for active in sorted(by_active)]


def same_everywhere(raised, size):
    """The sentence, once it is known that every rank raised it."""
    assert len(raised) == size
    (sentence,) = {str(error) for error in raised.values()}
    return sentence


def grouped(key, condition=lambda count: count == 2, **more):
    return lambda: Compose(ra.ShiftRanks(), ra.FilterCountGroupedByKey(key, condition, **more))


def pair(state):
    return state.rank // 2


def host(state):
    return f"host{state.initial_rank // 8}"


EIGHT = {"condition": lambda count: count == 8}


@pytest.mark.parametrize(
    "make",
    [
        grouped(host, **EIGHT),  # 001
        lambda: Compose(ra.ActivateAllRanks(), grouped(lambda state: state.rank // 8, **EIGHT)()),  # 002
        lambda: Compose(ra.ShiftRanks(), ra.FilterGroupedByKey(key_or_fn=lambda rank, _: rank // 8, **EIGHT)),  # 004
    ],
)
def test_the_filters_of_the_seeds_survive_deaths(make):
    """Hosts of eight, each lost as a whole with its first rank, twice."""
    job = Ranks(32, in_memory(), make)
    assert job.assign() == {} and job.active == list(range(32))
    for dead, left in ((9, [*range(8), *range(16, 32)]), (0, list(range(16, 32)))):
        raised = job.assign(died=[dead])
        assert {type(error) for error in raised.values()} == {ra.RankDiscarded} and len(raised) == 7
        assert job.active == left
        assert {(state.world_size, state.active_world_size) for state in job.states.values()} == {(len(left),) * 2}


def raise_on(bad):
    def key(state):
        if state.rank == bad:
            raise ValueError("no such host")
        return "all"

    return key


def test_an_abort_in_a_users_function_stays_one(views):
    def stop(count):
        raise RestartAbort("enough")

    raised = Ranks(3, views, grouped("all", stop)).assign()
    assert isinstance(raised.pop(0), RestartAbort)
    assert "RestartAbort: enough" in same_everywhere(raised, 2)


def test_a_condition_that_discards_everybody_is_said_to(views):
    job = Ranks(4, views, grouped(lambda state: f"host{state.rank // 2}"))
    assert job.assign() == {}
    raised = job.assign(died=[0, 2])
    assert "'host0' with 1, 'host1' with 1" in same_everywhere(raised, 2)
    assert {type(error) for error in raised.values()} == {ra.RankDiscarded}


BOTH = ra.LayerFlag.RESERVE | ra.LayerFlag.BACKFILL


@pytest.mark.parametrize(
    "absent, kind, why",
    [
        (2, InternalError, "only 3 of 4 ranks took part within 1 s"),
        (0, TimeoutError, "rank 0, which computes the rank assignment for all, gave none within 2 s"),
    ],
)
def test_a_rank_that_never_comes_costs_a_bounded_time(absent, kind, why):
    raised = Ranks(4, in_memory(), grouped("all", bool, timeout=SHORT)).assign(absent=[absent])
    assert why in same_everywhere(raised, 3)
    assert {type(error) for error in raised.values()} == {kind}


@pytest.mark.parametrize("make", [lambda: ra.Tree([ra.Layer()]), lambda: grouped("all", bool)()])
def test_a_rank_that_is_lost_meanwhile_stops_the_assignment_of_all_or_of_none(make):
    """The next one begins with the same states."""

    class Ended(MemoryStore):
        def wait(self, keys, timeout):
            raise RankLost("a rank was lost")

    store = [Ended()]
    job = Ranks(4, lambda iteration: store[0].iteration(iteration), make)
    job.views = lambda iteration: store[0]
    raised = job.assign(absent=[2])
    assert {type(error) for error in raised.values()} == {RankLost} and len(raised) == 3
    store[0] = MemoryStore()
    job.states = {rank: replace(state, iteration=1) for rank, state in job.before.items()}
    assert job.assign(died=[2]) == {} and job.active == [0, 1, 3]


TURNS = cycle([1, 2, 1, 1])
ERRORS = {
    "rank 0: ValueError: no such host": (grouped(raise_on(0)), ValueError),
    "rank 2: ValueError: no such host": (grouped(raise_on(2)), ValueError),
    "rank 0, computing for all: ZeroDivisionError": (grouped("all", lambda count: 1 // 0), ZeroDivisionError),
    "same on all ranks, but rank 0 has '0'": (lambda: ra.Tree([ra.Layer(key_or_fn=pair)]), None),
    "world_size_filter(4) returned 5": (lambda: ra.Tree([ra.Layer()], lambda size: size + 1), None),
    "rank 3: ValueError: no such host": (lambda: ra.Tree([ra.Layer(key_or_fn=raise_on(3))]), ValueError),
    "give all ranks the same layers": (lambda: ra.Tree([ra.Layer()] * next(TURNS)), None),
}


@pytest.mark.parametrize("token", ERRORS)
def test_an_error_of_one_rank_is_the_error_of_all(views, token):
    make, cause = ERRORS[token]
    raised = Ranks(4, views, make).assign()
    assert token in same_everywhere(raised, 4)
    assert {type(error) for error in raised.values()} == {InternalError}
    assert cause is None or any(isinstance(error.__cause__, cause) for error in raised.values())


def test_ranks_dead_before_the_first_iteration_are_not_in_the_tree(views):
    layers = [ra.Layer(1, None, "root"), ra.Layer(2, key_or_fn=lambda state: state.initial_rank // 2)]
    job = Ranks(4, views, lambda: ra.Tree(layers))
    raised = job.assign(died=[0])
    assert "layer 1 has fewer than min_ranks=2" in str(raised.pop(1)) and raised == {} and job.active == [2, 3]
    assert [(state.rank, state.world_size) for state in job.states.values()] == [(0, 2), (1, 2)]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(2, 8),
    st.integers(1, 3),
    st.none() | st.integers(1, 3),
    st.lists(st.sets(st.integers(0, 7), max_size=3), max_size=4),
)
def test_every_rank_reads_what_the_core_says(size, host, divisor, rounds):
    layers = [
        ra.Layer(1, None, "root", ra.LayerFlag.RESERVE),
        ra.Layer(1, 2, lambda state: state.initial_rank // host, BOTH),
    ]
    keep = None if divisor is None else lambda active: active - active % divisor
    topology = Topology([layer.level() for layer in layers], {r: ("root", str(r // host)) for r in range(size)})
    job = Ranks(size, in_memory(), lambda: ra.Tree(layers, keep))
    places, raised = topology.first_places(keep), job.assign()
    for died in rounds:
        alive = healthy(places)
        if not active_order(places) or set(alive) <= died:
            break
        assert raised == {} and job.active == active_order(places)
        assert [job.states[leaf].rank for leaf in alive] == list(range(len(alive)))
        died = died & set(alive)
        places, raised = topology.next_places(places, died, keep), job.assign(died=died)


dist = pytest.importorskip("torch.distributed")
FOREVER = timedelta(seconds=600)


def leadership(view, rank, size=3):
    ctx = ra.RankAssignmentCtx(State(rank, size, iteration=5), view, set())
    return Leadership(ctx, "test", 1, FOREVER)


class SilentStore(MemoryStore):
    """As torch before 2.9: nobody who waits is told of a `compare_set`."""

    def compare_set(self, key, expected, desired):
        with self._shared.changed:
            return self._values.setdefault(key, bytes(desired))


def test_a_verdict_wakes_where_compare_set_does_not():
    store = SilentStore()

    def decided(rank):
        one = leadership(store, rank)
        one.give(lambda: "key")
        return one.decide(lambda: ",".join(map(text_of, one.given())))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(decided, (2, 1, 0), timeout=BOUND_S)) == ["key,key,key"] * 3


def test_an_error_whose_text_no_store_takes_is_told_all_the_same():
    def compute():
        raise RankDiscarded("no place for \udce4")

    with pytest.raises(RankDiscarded, match=r"no place for \\udce4"):
        leadership(MemoryStore(), 0).decide(compute)
