"""What `Wrapper` refuses, and when; and how its object gets into the function."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Annotated, Any, Optional, Union

import pytest

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper, Compose, Wrapper
from nvrx_slurm.inprocess.call import with_wrapper, wrapper_parameters
from nvrx_slurm.inprocess.guard.call_page import CallPage
from nvrx_slurm.inprocess.plugins.rank_assignment import FilterCountGroupedByKey, ShiftRanks

pytestmark = pytest.mark.process


def s(seconds):
    return timedelta(seconds=seconds)


def test_names_and_defaults_are_those_of_nvrx():
    parameters = inspect.signature(Wrapper.__init__).parameters
    assert all(one.kind is one.KEYWORD_ONLY for name, one in parameters.items() if name != "self")
    seconds = {n: one.default.total_seconds() for n, one in parameters.items() if isinstance(one.default, timedelta)}
    assert seconds == {
        "monitor_thread_interval": 1,
        "monitor_process_interval": 1,
        "heartbeat_interval": 1,
        "progress_watchdog_interval": 1,
        "soft_timeout": 60,
        "hard_timeout": 90,
        "heartbeat_timeout": 30,
        "barrier_timeout": 120,
        "completion_timeout": 120,
        "last_call_wait": 1,
        "termination_grace_time": 5,
    }
    assert parameters["store_factory"].default is inprocess.store.stores.TCPStore
    assert isinstance(parameters["abort"].default, inprocess.plugins.abort.AbortTorchDistributed)


@pytest.mark.parametrize(
    "error, bad",
    [
        (ValueError, {"soft_timeout": s(90)}),
        (ValueError, {"monitor_process_interval": s(29), "soft_timeout": s(29)}),
        (ValueError, {"heartbeat_interval": s(30)}),
        (ValueError, {"soft_timeout": s(0)}),
        (ValueError, {"last_call_wait": s(-1)}),
        (ValueError, {"monitor_process_logfile": "monitor.log"}),
        (ValueError, {"rank_assignment": Compose(FilterCountGroupedByKey("a", bool), ShiftRanks())}),
        (TypeError, {"soft_timeout": 60}),
        (TypeError, {"abort": lambda state: state}),
        (TypeError, {"rank_assignment": (ShiftRanks(),)}),
        (TypeError, {"store_factory": "TCPStore"}),
        (TypeError, {"store_kwargs": ["port"]}),
        (TypeError, {"enabled": 1}),
        (TypeError, {"health_check": inprocess.initialize.RetryController()}),
    ],
)
def test_values_that_are_refused(error, bad):
    with pytest.raises(error, match="must be|list "):
        Wrapper(**bad)


def test_a_filter_of_older_nvrx_is_told_where_it_belongs():
    with pytest.raises(TypeError, match="rank_assignment"):
        Wrapper(rank_filter=None)  # type: ignore[call-arg]


def test_zero_is_allowed_for_waits_and_disabled_changes_nothing():
    Wrapper(last_call_wait=s(0), termination_grace_time=s(0))
    assert Wrapper(enabled=False)(plain) is plain


def test_only_plain_functions_can_be_wrapped():
    """Calling another one runs nothing that could be restarted."""

    def numbers():
        yield 1

    async def later():
        return 1

    async def stream():
        yield 1

    class Generating:
        def __call__(self):
            yield 1

    refused = [numbers, later, stream, Generating(), functools.partial(functools.partial(later))]
    for why, things in (("wraps functions", [3, int]), ("generator or coroutine", refused)):
        for thing in things:
            with pytest.raises(TypeError, match=why):
                Wrapper()(thing)
    assert callable(Wrapper()(functools.wraps(later)(lambda: asyncio.run(later())))), "it runs the coroutine to its end"


def test_the_main_thread_calls():
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="main thread"):
        pool.submit(Wrapper()(lambda: None)).result()


# One line each: a function whose parameter is to be filled, or not.
# fmt: off
def plain(x, call: CallWrapper): ...
def optional(call: Optional[CallWrapper] = None): ...  # noqa: UP007, UP045, E302
def piped(call: CallWrapper | None = None): ...  # noqa: E302
def unresolvable_union(call: inprocess.CallWrapper | None, other: NoSuchName): ...  # noqa
def unresolvable_text(call: "Union['CallWrapper', NoSuchName]"): ...  # noqa
def annotated(call: Annotated[Optional[CallWrapper], "ours"]): ...  # noqa: UP007, UP045, E302
def megatron(inprocess_call_wrapper: Optional[Any] = None): ...  # noqa: UP007, UP045, E302
def contained(calls: list[CallWrapper], by_name: dict[str, CallWrapper], make: Callable[[], CallWrapper]): ...
def kind(call: type[CallWrapper], other: type[CallWrapper] | None = None): ...
def rest(*calls: CallWrapper, **more: CallWrapper): ...
def without(x, call=None): ...


class Callable_:
    def __call__(self, call: CallWrapper): ...
# fmt: on


TAKE = [plain, optional, piped, unresolvable_union, unresolvable_text, annotated]
TAKE += [Callable_(), Callable_().__call__, functools.partial(plain, 3)]
TAKE_NONE = [contained, kind, rest, without, print, asyncio.sleep]


def test_the_annotation_is_found_and_no_other_parameter_is_filled():
    for fn in (*TAKE, *TAKE_NONE):
        assert wrapper_parameters(fn) == ["call"] * (fn in TAKE), fn
    assert wrapper_parameters(megatron) == ["inprocess_call_wrapper"]


def test_arguments_of_the_caller_stay_unless_they_are_none():
    """NVRx wants a parameter without a default to be filled by the caller."""
    call, own = CallWrapper(CallPage()), CallWrapper(CallPage())

    def placed(a, call: CallWrapper, /): ...

    def behind(a, *rest, call: CallWrapper): ...

    for fn, args, kwargs, filled in (
        (plain, (1,), {}, ((1, call), {})),
        (plain, (1, own), {}, ((1, own), {})),
        (plain, (1,), {"call": own}, ((1, own), {})),
        (plain, (1, None), {}, ((1, call), {})),
        (plain, (1,), {"call": None}, ((1, call), {})),
        (placed, (1,), {}, ((1, call), {})),
        (behind, (1, 2, 3), {}, ((1, 2, 3), {"call": call})),
    ):
        assert with_wrapper(fn, ["call"], call, args, kwargs) == filled
