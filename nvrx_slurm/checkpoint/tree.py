"""A state as a description and bytes, and back. Nothing is pickled: only tensors and plain values are kept."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nvrx_slurm.checkpoint.link import CheckpointError
from nvrx_slurm.codec import Wire
from nvrx_slurm.declared import Big, Name, Path, Record
from nvrx_slurm.errors import ProtocolError

_ALIGNED_BYTES = 64
_LENGTH_BYTES = 8  # that tell the length of the description: a save ends with them
_MAX_DEPTH = 64
_MAX_INT = 1 << 63
ABSENT: Any = object()  # there is nothing to overwrite


class SavedTensor(Record):
    """Where the bytes of a tensor are."""

    at: Big
    shape: tuple[Big, ...]
    dtype: Name
    layout: Path = ""  # of which DTensor it is the local part


class SavedDict(Record):
    """Keys are plain values."""

    keys: tuple[Value, ...]
    values: tuple[Value, ...]


class SavedList(Record):
    """A list, or a tuple."""

    items: tuple[Value, ...]
    is_tuple: bool = False


class SavedInt(Record):
    """An integer of more than 64 bits."""

    text: str


class SavedBytes(Record):
    """Bytes."""

    data: bytes


Value = (
    None | bool | int | float | str | SavedBytes | SavedTensor | SavedDict | SavedList | SavedInt
)
_wire: Wire[Any] = Wire(SavedList)


class Mapped:
    """Bytes, and tensors in them. These are kept for the next state, which mostly has the same places."""

    def __init__(self, pages: mmap.mmap) -> None:
        self.pages = pages
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        self._places: list[SavedTensor] = []
        self._views: list[torch.Tensor] = []

    def views(self, places: list[SavedTensor]) -> list[torch.Tensor]:
        """A tensor at each of these places."""
        if places != self._places:
            self._places, self._views = places, [view(self.memory, one) for one in places]
        return self._views


@dataclass
class Flat:
    """A state, ready to be copied. `size`: bytes of all tensors."""

    tree: bytes = b""
    places: list[SavedTensor] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    size: int = 0

    def copy_to(self, mapped: Mapped) -> None:
        """All tensors and the description, into bytes."""
        with torch.no_grad():
            for into, tensor in zip(mapped.views(self.places), self.tensors, strict=True):
                into.copy_(tensor)
        mapped.pages[self.size : self.size + len(self.tree)] = self.tree


def flatten(state: Any) -> Flat:
    """Raises CheckpointError, which names the place of what cannot be saved."""
    flat = Flat()
    root = _saved(state, "state", flat, 0)
    try:
        tree = _wire.exact(SavedList((root,)))
    except UnicodeEncodeError:
        raise CheckpointError(
            "a text in state is not valid Unicode, which cannot be saved; save its bytes"
        ) from None
    flat.tree = tree + len(tree).to_bytes(_LENGTH_BYTES, "big")
    return flat


def unpacked(saved: mmap.mmap, size: int) -> Value:
    """The description of a save, which has `size` bytes. Raises CheckpointError."""
    end = size - _LENGTH_BYTES
    length = int.from_bytes(saved[end:size], "big")
    try:
        root: Value = _wire.decode(saved[end - length : end]).items[0]
        return root
    except (ProtocolError, IndexError) as error:
        raise CheckpointError(f"the description of the state is damaged: {error}") from None


def view(memory: torch.Tensor, saved: SavedTensor) -> torch.Tensor:
    """A tensor in bytes."""
    dtype = _dtype(saved)
    count = math.prod(saved.shape) * dtype.itemsize
    return memory[saved.at : saved.at + count].view(dtype).view(saved.shape)


def _saved(value: Any, where: str, flat: Flat, depth: int) -> Value:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where[:80]} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        return _saved_tensor(value, where, flat)
    if isinstance(value, Mapping):
        keys = tuple(_plain(key, f"a key of {where}") for key in value)
        return SavedDict(
            keys,
            tuple(_saved(one, f"{where}[{key!r}]", flat, depth + 1) for key, one in value.items()),
        )
    if isinstance(value, (list, tuple)):
        items = (
            _saved(one, f"{where}[{index}]", flat, depth + 1) for index, one in enumerate(value)
        )
        return SavedList(tuple(items), isinstance(value, tuple))
    return _plain(value, where)


def _plain(value: Any, where: str) -> Value:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if -_MAX_INT <= value < _MAX_INT else SavedInt(hex(value))
    if isinstance(value, bytes):
        return SavedBytes(value)
    for kind in (float, str):  # also their subclasses, as numpy.float64
        if isinstance(value, kind):
            return kind(value)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved; "
        "make a tensor, number or text of it"
    )


def _saved_tensor(value: torch.Tensor, where: str, flat: Flat) -> SavedTensor:
    local, layout = local_part(value, where)
    at = -(-flat.size // _ALIGNED_BYTES) * _ALIGNED_BYTES
    saved = SavedTensor(at, tuple(local.shape), str(local.dtype), layout)
    flat.places.append(saved)
    flat.tensors.append(local)
    flat.size = at + local.nbytes
    return saved


def local_part(value: torch.Tensor, where: str) -> tuple[torch.Tensor, str]:
    """The tensor, or the local part of a DTensor, and the layout of that. Raises CheckpointError."""
    layout = ""
    if (
        type(value) is not torch.Tensor
        and hasattr(value, "device_mesh")
        and hasattr(value, "placements")
    ):
        mesh = tuple(value.device_mesh.shape)
        layout = f"{tuple(value.shape)} over {mesh} as {value.placements}"
        with torch.no_grad():
            value = value.to_local()  # type: ignore[attr-defined]
    is_ordinary = type(value) is torch.Tensor or isinstance(value, torch.nn.Parameter)
    if not is_ordinary or value.layout is not torch.strided or value.is_meta or value.is_quantized:
        kind = f"{type(value).__qualname__} ({value.layout}, {value.device}, {value.dtype})"
        raise CheckpointError(f"{where} is a tensor of the kind {kind}, which cannot be saved")
    return value, layout


class Fitting:
    """What was saved, brought into `target`: nothing of it changes before all is known to fit.

    Raises CheckpointError, which names the place that does not.
    """

    def __init__(self, saved: Value, target: Any) -> None:
        self._copies: list[tuple[torch.Tensor, SavedTensor]] = []
        self._fills: list[tuple[Any, Any]] = []  # dict or list, and its new content
        self._state = self._fit(saved, target, "state")

    def fill(self, memory: torch.Tensor) -> Any:
        """The state: `target`, where it was given."""
        with torch.no_grad():
            for into, saved in self._copies:
                into.copy_(view(memory, saved))
        for container, content in self._fills:
            if isinstance(container, dict):
                container.update(content)
            else:
                container[:] = content
        return self._state

    def _fit(self, saved: Value, target: Any, where: str) -> Any:
        if isinstance(saved, SavedTensor):
            return self._fit_tensor(saved, target, where)
        if isinstance(saved, SavedDict):
            return self._fit_dict(saved, target, where)
        if isinstance(saved, SavedList):
            return self._fit_list(saved, target, where)
        if isinstance(target, (torch.Tensor, dict)):
            raise CheckpointError(f"{where} is a {type(target).__name__}, and the saved one is not")
        return _key(saved)

    def _fit_tensor(self, saved: SavedTensor, target: Any, where: str) -> torch.Tensor:
        if not isinstance(target, torch.Tensor):
            if saved.layout:
                raise CheckpointError(
                    f"{where} is a part of a DTensor: call load with a state that has it"
                )
            if target is not ABSENT and target is not None:
                raise CheckpointError(
                    f"{where} is a {type(target).__name__}, and the saved one is a tensor"
                )
            target = torch.empty(saved.shape, dtype=_dtype(saved))
        local, layout = local_part(target, where)
        mine, theirs = (
            (tuple(local.shape), str(local.dtype), layout),
            (saved.shape, saved.dtype, saved.layout),
        )
        if mine != theirs:
            raise CheckpointError(
                f"{where} is {_told(*mine)}, and the saved one is {_told(*theirs)}"
            )
        self._copies.append((local, saved))
        return target

    def _fit_dict(self, saved: SavedDict, target: Any, where: str) -> Any:
        given = {} if target is ABSENT else target
        if not isinstance(given, dict):
            raise CheckpointError(f"{where} is no dict, and the saved one is")
        pairs = {_key(key): one for key, one in zip(saved.keys, saved.values, strict=True)}
        for key in given:
            if key not in pairs:
                raise CheckpointError(f"{where}[{key!r}] was not saved")
        content = {
            key: self._fit(one, given.get(key, ABSENT), f"{where}[{key!r}]")
            for key, one in pairs.items()
        }
        self._fills.append((given, content))
        return given

    def _fit_list(self, saved: SavedList, target: Any, where: str) -> Any:
        given = target if isinstance(target, (list, tuple)) else [ABSENT] * len(saved.items)
        if len(given) != len(saved.items):
            raise CheckpointError(
                f"{where} has {len(given)} items, and the saved one has {len(saved.items)}"
            )
        pairs = enumerate(zip(saved.items, given, strict=True))
        content = [self._fit(one, old, f"{where}[{index}]") for index, (one, old) in pairs]
        if saved.is_tuple:
            return tuple(content)
        if not isinstance(target, list):
            return content
        self._fills.append((target, content))
        return target


def _dtype(saved: SavedTensor) -> Any:
    return getattr(torch, saved.dtype.removeprefix("torch."))


def _told(shape: tuple[int, ...], dtype: str, layout: str) -> str:
    return f"{list(shape)} {dtype}" + (f" of {layout}" if layout else "")


def _key(saved: Value) -> Any:
    if isinstance(saved, SavedBytes):
        return saved.data
    return int(saved.text, 16) if isinstance(saved, SavedInt) else saved
