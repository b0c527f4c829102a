"""What the parts of a node's program have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

Post = Callable[[Any], None]  # hands one event to a core, see `agent.shell.Shell.post`


class Role(Protocol):
    """One job of the program: it carries out commands of a core and posts events to it.

    A role may post events as soon as it is started. Commands come only after all roles have been started.
    """

    commands: ClassVar[tuple[type, ...]]  # the types that `handle` takes

    async def start(self) -> None:
        """Begin. Raises NvrxError where the node cannot take part."""

    def handle(self, command: Any) -> None:
        """Carry out one command; never blocks."""

    async def close(self) -> None:
        """End, and reap all child processes. Bounded, never raises; a second call does nothing."""
