"""Exceptions of the wrapped function: their tracebacks, their chains of causes, and what these keep alive."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

_PACKAGE = os.path.dirname(__file__) + os.sep


def without_our_frames(error: BaseException) -> BaseException:
    """The exception; its traceback begins at the first frame of the user's."""
    first: TracebackType | None = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        first = first.tb_next
    return error.with_traceback(first) if first is not None else error


def blame(error: BaseException, cause: BaseException | None) -> None:
    """Let the chain of causes of `error` end with `cause`, which is the same on all ranks."""
    chain, causes = _chain(error), _chain(cause)
    last = chain[-1]
    if causes and last.__context__ is None and not any(one is other for one in chain for other in causes):
        last.__cause__ = cause


def _chain(error: BaseException | None) -> list[BaseException]:
    """The exception and its causes, each once: a chain may be circular."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        error = error.__cause__
    return chain


def free_frames(error: BaseException | None) -> None:
    """Free the local variables of the function's frames (tensors!), though a reference to the exception is kept."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
        todo += [one.__cause__, one.__context__]


def ending_forks(function: Callable[[], Any]) -> Any:
    """Call it; a child process that it forks ends where the function does, and never runs the wrapper's code."""
    pid = os.getpid()
    try:
        return function()
    finally:
        if os.getpid() != pid:
            error = sys.exc_info()[1]
            if error is not None:
                sys.excepthook(type(error), error, error.__traceback__)
            os._exit(int(error is not None))
