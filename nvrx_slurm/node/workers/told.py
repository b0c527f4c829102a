"""What workers tell of their imports: a socket of datagrams, since a worker keeps no descriptor for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.codec import from_plain
from nvrx_slurm.core.preload import Module
from nvrx_slurm.declared import Record, Variables
from nvrx_slurm.errors import ProtocolError

_MESSAGE_BYTES = 1 << 16
_NOT_SET = "\0"  # no value of a variable


class Message(Record):
    """What a worker tells, see `warm.template`: one of `imported`, `anew` and `restart`."""

    pid: int
    changes: Variables
    imported: str = ""
    anew: str = ""
    restart: str = ""
    module: str = ""


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
    """Hands each message to `on_message(message)`.

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
            message = from_plain(json.loads(self._socket.recv(_MESSAGE_BYTES)), Message)
        except (BlockingIOError, ValueError, RecursionError, ProtocolError):
            return
        self._on_message(message)
