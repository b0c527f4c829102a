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
            content = await bounded.call_async(self._load, READ_TIMEOUT_S, "progress file")
        except bounded.Overrun:
            raise _Unusable(_HANGS) from None
        text = content.strip()
        if len(content) > _MAX_BYTES or len(text) > _MAX_DIGITS or not text.isdigit():  # of bytes: ASCII digits only
            found = text[:40].decode("ascii", "backslashreplace")
            raise _Unusable(f"it must hold one integer of 0 or more, in at most {_MAX_BYTES} bytes, not {found!r}")
        return int(text)

    def _load(self) -> bytes:
        """In the thread."""
        self._reading = True
        try:
            return _read(self._path)
        finally:
            self._reading = False


def _read(path: str) -> bytes:
    """At most _MAX_BYTES + 1 of the file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES + 1)
