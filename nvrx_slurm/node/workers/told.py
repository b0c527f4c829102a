"""What workers tell of their imports: a socket of datagrams, since a worker keeps no descriptor for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.preload import Module

_MESSAGE_BYTES = 1 << 16
_MAX_CHANGES = 1000  # variables in a message
_NOT_SET = "\0"  # no value of a variable
Message = Mapping[str, Any]  # see `warm.template`


def as_news(modules: Sequence[Module]) -> t.Imports:
    """What the ranks of this node import, for other nodes."""
    return t.Imports(
        tuple(
            t.Imported(name, tuple(changes), tuple(_NOT_SET if one is None else one for one in changes.values()))
            for name, changes in modules
        )
    )


def as_modules(news: t.Imports) -> tuple[Module, ...]:
    """What the ranks of other nodes import."""
    return tuple(
        (
            one.module,
            {name: None if value == _NOT_SET else value for name, value in zip(one.names, one.values, strict=False)},
        )
        for one in news.modules
    )


class Told:
    """Hands each message to `on_message(message)`: "pid", "changes", and one of "imported", "anew", "restart".

    Any process of this user can send here, so what is no such message is dropped. All methods belong to the thread of
    the running event loop. Raises OSError where no socket can be made.
    """

    def __init__(self, path: str, on_message: Callable[[Message], None]) -> None:
        self._path = path
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(self._path)
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._hear)

    def close(self) -> None:
        """A second call does nothing."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def _hear(self) -> None:
        try:
            message = json.loads(self._socket.recv(_MESSAGE_BYTES))
        except (BlockingIOError, ValueError, RecursionError):
            return
        if _is_valid(message):
            self._on_message(message)


def _is_valid(message: object) -> bool:
    if not isinstance(message, dict) or type(message.get("pid")) is not int:
        return False
    changes = message.get("changes")
    if not isinstance(changes, dict) or len(changes) > _MAX_CHANGES:
        return False
    values = (value for value in changes.values() if value is not None)
    texts = [message[key] for key in ("imported", "anew", "restart") if key in message]
    return len(texts) == 1 and all(isinstance(text, str) for text in (*texts, *values))
