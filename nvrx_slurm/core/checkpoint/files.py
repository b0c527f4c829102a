"""Whether one file of a checkpoint is whole, by its size, header and directory. Nothing is unpickled. Pure.

Sources: APPNOTE.TXT of the zip format, which torch.save writes; the safetensors format; `.metadata` of
torch.distributed.checkpoint (DCP), a pickle whose opcodes are read and not executed.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping

Read = Callable[[int, int], bytes]  # (offset, length) -> bytes, fewer at the end of the file

# bytes of a text or of a `.metadata`: parsing more would hold up the event loop
_MOST_PARSED = 1 << 18
_MOST_HEADER = 100_000_000  # bytes; the limit of safetensors itself
_EOCD, _LOCATOR = 22, 20  # bytes of the records at the end of a zip file
_SHARD = re.compile(rb"__\d+_\d+\.distcp")
_MEMO, _RECALL = ("MEMOIZE", "BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


def damage(name: str, size: int, read: Read) -> str:
    """What is wrong with the file `name` of `size` bytes; "" = nothing that shows without its content.

    Raises what `read` raises.
    """
    suffix = name.rpartition(".")[2]
    judge = _JUDGES.get(suffix)
    if not size:  # other files may be marks
        return "it is empty" if judge is not None or suffix in ("distcp", "metadata") else ""
    if judge is not None:
        return judge(size, read)
    if suffix == "distcp":  # one zip file after the other, each with one tensor
        zipped = read(0, 4) == b"PK\3\4"
        return "it is cut off" if zipped and read(max(0, size - _EOCD), 4) != b"PK\5\6" else ""
    return "it is cut off" if suffix == "metadata" and read(size - 1, 1) != b"." else ""


def _zip(size: int, read: Read) -> str:
    head = read(0, 4)
    # a bare pickle, as torch wrote before 1.6, or of another kind: its length is not known
    if head != b"PK\3\4":
        return "" if any(head) else "its first bytes were never written"
    end = read(max(0, size - _EOCD), _EOCD)
    if len(end) < _EOCD or end[:4] != b"PK\5\6":
        return "it is cut off: its end has no zip directory"
    length, start = struct.unpack("<II", end[12:20])
    until, locator = size - _EOCD, read(max(0, size - _EOCD - _LOCATOR), _LOCATOR)
    if locator[:4] == b"PK\6\7":
        (until,) = struct.unpack("<Q", locator[8:16])
        record = read(until + 40, 16) if until < size else b""
        length, start = struct.unpack("<QQ", record) if len(record) == 16 else (-1, 0)
    whole = start + length == until and read(start, 4) == b"PK\1\2"
    return "" if whole else "its zip directory is not where its end says"


def _safetensors(size: int, read: Read) -> str:
    length = int.from_bytes(read(0, 8), "little")
    if not 0 < length <= min(size - 8, _MOST_HEADER):
        return "its header is longer than the file"
    try:
        header = json.loads(read(8, length))
        ends = [
            int(tensor["data_offsets"][1])
            for name, tensor in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "its header cannot be read"
    told = 8 + length + max(ends, default=0)
    return "" if told == size else f"it has {size} bytes, its header tells of {told}"


def _text(size: int, read: Read) -> str:
    """JSON. Of a long one only the end is read."""
    try:
        if size <= _MOST_PARSED:
            json.loads(read(0, size))
        return "" if read(size - 4, 4).strip()[-1:] in b"}]" else "it is cut off"
    except (ValueError, RecursionError):
        return "it is not complete JSON"


_JUDGES = dict.fromkeys(("pt", "pth", "ckpt", "bin", "npz"), _zip) | {
    "safetensors": _safetensors,
    "json": _text,
}


def needed(name: str, size: int, read: Read) -> Mapping[str, int]:
    """The files beside it that a `.metadata` of DCP, or an index of Hugging Face, names, each with its least bytes.

    {}: it names none, or cannot be read. Raises what `read` raises.
    """
    if name.endswith(".metadata"):
        data = read(0, size)
        if size > _MOST_PARSED:
            return dict.fromkeys((shard.decode() for shard in set(_SHARD.findall(data))), 1)
        return _of_metadata(data)
    if name.endswith(".index.json"):
        try:
            return dict.fromkeys(map(str, json.loads(read(0, size))["weight_map"].values()), 1)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}
    return {}


def _of_metadata(data: bytes) -> dict[str, int]:
    """From `storage_data`, where each `_StorageInfo` has relative_path, offset and length, in this order."""
    from pickletools import genops  # a disassembler

    memo: dict[int, str] = {}
    found: dict[str, int] = {}
    key = text = path = ""
    offset = 0
    try:
        for op, arg, _ in genops(data):
            if op.name in _MEMO:
                memo[len(memo) if arg is None else arg] = text
                continue
            text = (
                arg
                if isinstance(arg, str)
                else memo.get(int(arg or 0), "")
                if op.name in _RECALL
                else ""
            )
            if text in ("relative_path", "offset", "length"):
                key = text
            elif key == "relative_path" and text:
                path, key = text, ""
            elif key in ("offset", "length") and isinstance(arg, int) and op.name not in _RECALL:
                if key == "length":
                    found[path] = max(found.get(path, 1), offset + arg)
                offset, key = arg, ""
    except ValueError:  # cut off, or no pickle
        return {}
    return found
