"""What the wrapped function may ask the wrapper for, and how it gets hold of it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import time
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.watch.progress import MANUAL, SUSPENDED, Page
from nvrx_slurm.inprocess.watch.stopping import Stopper


class CallWrapper:
    """One call of a wrapped function, passed to a parameter that is annotated with this class (see `takers`).

    All methods belong to the function's own thread, while it runs.
    """

    def __init__(self, page: Page) -> None:
        self._page, self._pid = page, os.getpid()
        self._words = page.words
        self._state: State | None = None
        self._stopper: Stopper | None = None

    def begin(self, state: State, stopper: Stopper) -> None:
        """Of the wrapper: an iteration begins."""
        self._state, self._stopper = state, stopper
        self._words[MANUAL] = self._words[SUSPENDED] = 0  # a restart may have cut off what would have cleared them

    @property
    def iteration(self) -> int:
        """How often the function has been called before."""
        assert self._state is not None
        return self._state.iteration

    def ping(self) -> None:
        """Report progress. From the first ping of an iteration on, silence counts as a hang (soft, hard timeout).
        In a process that the function has forked it does nothing: that one's progress is not the rank's."""
        if os.getpid() == self._pid:
            self._words[MANUAL] = time.monotonic_ns()

    def atomic(self) -> contextlib.AbstractContextManager[None]:
        """A block that is not interrupted by a restart, and is not begun any more once one is under way.

        For what must be done wholly or not at all, such as replacing a checkpoint. May be nested. In a process that
        the function has forked, where nothing is interrupted, it is a plain block.
        """
        if self._page.is_of_another:
            return contextlib.nullcontext()
        assert self._stopper is not None
        return self._stopper.atomic()

    @contextlib.contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """A block in which neither soft nor hard timeout applies. May be nested. A plain block in a forked process."""
        if self._page.is_of_another:
            yield
            return
        stopper = self._stopper
        self._words[SUSPENDED] += 1
        try:
            yield
        finally:  # a generator that somebody keeps may end the block in a later iteration: it is not of that one
            if not self._page.is_of_another and self._stopper is stopper:
                self._page.beat()
                if self._words[MANUAL]:
                    self.ping()
                self._words[SUSPENDED] -= 1


def takers(fn: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are annotated with CallWrapper, a union it is in (Optional too), or a text of these.

    Nothing else counts: no container of it, and no `*args` or `**kwargs`. Raises TypeError for a parameter that is
    positional-only, since the wrapper passes itself by name.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    target = fn if inspect.isroutine(fn) or inspect.isclass(fn) else type(fn).__call__
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # names that exist for type checkers only
        hints = {}
    found = [one for name, one in parameters.items() if _takes(hints.get(name, one.annotation))]
    for one in found:
        if one.kind is one.POSITIONAL_ONLY:
            raise TypeError(
                f"{getattr(fn, '__qualname__', fn)}: the CallWrapper is passed by name, but {one.name!r} is "
                "positional-only; list it behind the '/'"
            )
    return [one.name for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _takes(annotation: Any) -> bool:
    if isinstance(annotation, str):
        with contextlib.suppress(SyntaxError):
            return _names(ast.parse(annotation, mode="eval").body)
        return False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return CallWrapper in typing.get_args(annotation)
    return annotation is CallWrapper


def _names(annotation: ast.expr) -> bool:
    """The same of one that cannot be evaluated."""
    match annotation:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name == CallWrapper.__name__
        case ast.BinOp(left, ast.BitOr(), right):
            return _names(left) or _names(right)
        case ast.Subscript(ast.Name("Optional" | "Union") | ast.Attribute(attr="Optional" | "Union"), inner):
            return any(map(_names, inner.elts if isinstance(inner, ast.Tuple) else [inner]))
        case ast.Constant(str(text)):
            return _takes(text)
    return False


def with_wrapper(
    fn: Callable[..., Any], names: Sequence[str], call: CallWrapper, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs`, and the wrapper for those of `names` that the caller has not filled, or with None."""
    if not names:
        return args, dict(kwargs)
    parameters = inspect.signature(fn).parameters
    placed, named = list(args), dict(kwargs)
    for place, (name, parameter) in enumerate(parameters.items()):
        if name not in names:
            continue
        if place < len(args) and parameter.kind is not parameter.KEYWORD_ONLY:
            placed[place] = call if args[place] is None else args[place]
        elif named.get(name) is None:
            named[name] = call
    return tuple(placed), named
