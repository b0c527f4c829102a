"""The checkpoint iteration file (--ft-checkpoint-iteration-file), in which the training writes how far it is."""

from __future__ import annotations

from collections.abc import Callable

from nvrx_slurm.system import bounded

READ_TIMEOUT_S = 5.0
_HANGS = f"its file system does not answer within {READ_TIMEOUT_S:g} s"
_MAX_DIGITS = 18  # an iteration has to fit into a message
_MAX_BYTES = 4096


class _Unusable(Exception):
    """The file holds no iteration; the message does not name the file."""


class ProgressFile:
    """Reads the file in a thread, because `path` may be on a file system that hangs.

    `say` gets one sentence when the file cannot be used, and the next one only after it could be used.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._said = ""  # the last reason that was said
        self._reading = False  # a thread reads, and may be stuck: no second one is started

    async def read(self) -> int | None:
        """The iteration, at most READ_TIMEOUT_S later; None = there is no usable one.

        The file must hold one decimal integer of 0 or more, in at most 4,096 bytes.
        """
        try:
            iteration = await self._iteration()
        except (_Unusable, OSError, RuntimeError, ValueError) as error:  # ValueError: a name with a 0 in it
            why = str(getattr(error, "strerror", None) or error)
            if why != self._said:
                self._say(f"progress is not counted: the checkpoint iteration file {self._path} cannot be used: {why}")
            self._said = why
            return None
        self._said = ""
        return iteration

    async def _iteration(self) -> int:
        """Raises _Unusable, OSError, ValueError, and RuntimeError if no thread can be started."""
        if self._reading:
            raise _Unusable(_HANGS)  # an earlier read has not ended
        try:
            return await bounded.call_async(self._load, READ_TIMEOUT_S, "progress file")
        except bounded.Overrun:
            raise _Unusable(_HANGS) from None

    def _load(self) -> int:
        """In the thread."""
        self._reading = True
        try:
            return _parse(_read(self._path))
        finally:
            self._reading = False


def _read(path: str) -> bytes:
    """At most _MAX_BYTES + 1 of the file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES + 1)


def _parse(content: bytes) -> int:
    if len(content) > _MAX_BYTES:
        raise _Unusable(f"it is longer than {_MAX_BYTES} bytes")
    text = content.strip()
    if not text:
        raise _Unusable("it is empty")
    if not text.isdigit():  # of bytes: ASCII digits only
        raise _Unusable(f"it must hold one integer of 0 or more, not {text[:40].decode('ascii', 'backslashreplace')!r}")
    if len(text) > _MAX_DIGITS:
        raise _Unusable(f"{text[:_MAX_DIGITS].decode()}... is no iteration")
    return int(text)
