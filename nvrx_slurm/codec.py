"""The one codec of records: MessagePack on the wire, JSON in event logs. What it decodes fits the declaration."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from nvrx_slurm.declared import Record
from nvrx_slurm.errors import ProtocolError

T = TypeVar("T")
R = TypeVar("R", bound=Record)
_wire = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()


class Wire(Generic[T]):
    """Frames with messages of one direction. `kind`: a record, or a union of records."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        # made when it is needed: it takes milliseconds
        self._decoder: msgspec.msgpack.Decoder[T] | None = None

    def encode(self, message: T) -> bytes:
        """The frame of a message, whose texts and lists are cut to their bounds."""
        try:
            frame = _wire.encode(message)
            self.decode(frame)
        except (UnicodeEncodeError, ProtocolError):
            frame = _wire.encode(_cut(message))
        return frame

    def exact(self, message: T) -> bytes:
        """The frame of a message that is known to fit, nothing cut. Raises UnicodeEncodeError for a lone surrogate."""
        return _wire.encode(message)

    def decode(self, frame: bytes) -> T:
        """The message in a frame. Raises ProtocolError, which names the field."""
        self._decoder = self._decoder or msgspec.msgpack.Decoder(self._kind)
        try:
            return self._decoder.decode(frame)
        except (ValueError, RecursionError) as error:  # of msgspec, and of texts that are not UTF-8
            raise ProtocolError(
                f"the peer sent what is no message of this version: {error}"
            ) from None


def fitted(record: R) -> R:
    """The record, its texts and lists cut to their bounds."""
    try:
        return _wire_of(type(record)).decode(_wire.encode(record))
    except (UnicodeEncodeError, ProtocolError):
        return _cut(record)


_wire_of: Callable[[type], Wire[Any]] = cache(Wire)


def to_json(value: Any) -> str:
    """One line of JSON. Raises ProtocolError for what it cannot hold."""
    try:
        return _json.encode(value).decode()
    except UnicodeEncodeError:
        return _json.encode(_cut(value)).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be written as JSON: {error}") from None


def from_plain(value: Any, kind: Any) -> Any:
    """The record of class `kind`, or of one of a union, in a decoded JSON value. Raises ProtocolError."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(str(error)) from None


def _cut(value: Any, hint: Any = None) -> Any:
    """Cut texts and lists to the bounds in `hint`, at any depth. Lone surrogates, which paths may hold, become "?"."""
    bare, *metas = get_args(hint) if get_origin(hint) is Annotated else [hint]
    lengths = [
        one.max_length for one in metas if isinstance(one, Meta) and one.max_length is not None
    ]
    most = min(lengths, default=None)
    if type(value) is str:
        return value.encode("utf-8", "replace").decode()[:most]
    if isinstance(value, str):  # of an enumeration
        return value
    if isinstance(value, dict):
        return {key: _cut(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, tuple):
        item = next(iter(get_args(bare)), None)
        return tuple(_cut(one, item) for one in value[:most])
    if not isinstance(value, Record):
        return value
    hints = _hints(type(value))
    return type(value)(
        **{name: _cut(getattr(value, name), hints[name]) for name in value.__struct_fields__}
    )


_hints: Callable[[type], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
