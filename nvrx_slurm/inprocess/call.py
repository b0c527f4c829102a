"""CallWrapper: the wrapper's services for the wrapped function, and the parameters that receive it."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.inprocess.guard.call_page import MANUAL, UNPROTECTED, CallPage
from nvrx_slurm.inprocess.guard.stopping import Stopper
from nvrx_slurm.inprocess.state import State


class CallWrapper:
    """One call of a wrapped function. The wrapper passes it to parameters annotated with this class.

    All methods belong to the function's own thread, while it runs.
    """

    def __init__(self, page: CallPage) -> None:
        self._page, self._pid = page, os.getpid()
        self._words = page.words
        self._state: State | None = None
        self._stopper: Stopper | None = None

    def begin(self, state: State, stopper: Stopper) -> None:
        """Called by the wrapper at the start of an iteration."""
        self._state = state
        self._stopper = stopper
        # a restart may have cut off the code that clears them
        self._words[MANUAL] = self._words[UNPROTECTED] = 0

    @property
    def iteration(self) -> int:
        """Number of calls of the function before this one."""
        assert self._state is not None
        return self._state.iteration

    def ping(self) -> None:
        """Report progress. From the first ping of an iteration on, silence counts as a hang (soft, hard timeout).

        It has no effect in a child process, such as a worker of a DataLoader.
        """
        if os.getpid() == self._pid:
            self._words[MANUAL] = time.monotonic_ns()

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A block that is not interrupted by a restart, and cannot be entered once one has begun. May be nested.

        For an action that must be done completely or not at all, such as replacing a checkpoint.
        """
        assert self._stopper is not None
        return self._stopper.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A block in which neither soft nor hard timeout applies. May be nested."""
        self._words[UNPROTECTED] += 1
        try:
            yield
        finally:
            self._page.beat()
            if self._words[MANUAL]:
                self.ping()
            # `begin` may have cleared it
            self._words[UNPROTECTED] = max(0, self._words[UNPROTECTED] - 1)


def wrapper_parameters(fn: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are annotated with CallWrapper, or a union or Optional with it, also as a string.

    A container of it does not count, nor `*args` and `**kwargs`. A parameter with the name `inprocess_call_wrapper`
    needs no annotation: Megatron-LM's is `Optional[Any]`.
    """
    parameters = inspect.signature(fn).parameters
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # names that exist for type checkers only
        hints = {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    hints["inprocess_call_wrapper"] = CallWrapper
    return [
        name
        for name, one in parameters.items()
        if one.kind not in variable and _takes(hints.get(name, one.annotation))
    ]


def _takes(annotation: Any) -> bool:
    if isinstance(annotation, str):  # with a name that cannot be evaluated
        return re.search(rf"\b{CallWrapper.__name__}\b", annotation) is not None
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return CallWrapper in typing.get_args(annotation)
    return annotation is CallWrapper


def with_wrapper(
    fn: Callable[..., Any],
    names: Sequence[str],
    call: CallWrapper,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs`, with the wrapper for those of `names` that the caller has not passed, or passed as None.

    Raises TypeError for arguments that `fn` does not take.
    """
    if not names:
        return args, dict(kwargs)
    bound = inspect.signature(fn).bind_partial(*args, **kwargs)
    for name in names:
        if bound.arguments.get(name) is None:
            bound.arguments[name] = call
    return bound.args, bound.kwargs
