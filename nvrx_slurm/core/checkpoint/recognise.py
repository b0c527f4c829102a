"""Which checkpoints a directory holds, and which of them are complete. Pure: from names, sizes, times and `files`.

A checkpoint is complete if each of its files is whole, if the files that they name are there, and if it has the mark
that its format sets last:

    DCP             DIR/.metadata, not older than the shards (torchtitan, FSDP; also within the others)
    Megatron        latest_checkpointed_iteration.txt names iter_N or a later one; iter_N/common.pt beside DCP
    Hugging Face    checkpoint-N/trainer_state.json and a model, with all shards that its index names
    Lightning       NAME-step=N.ckpt, a zip file, or a directory with DCP
    others          step_N.pt; a directory without a mark has at least the files of the one before it
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from nvrx_slurm.declared import Record

TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".safetensors")
_CLOCKS_S = 2.0  # nodes that write to one file system may differ by this
_NAME = re.compile(r"(?:iter|iteration|step|checkpoint|ckpt|epoch)[=_-]?(\d{1,18})", re.IGNORECASE)
_UNFINISHED = re.compile(r"^\.|tmp|\.part|incomplete", re.IGNORECASE)
_OF_TRAINER = re.compile(r"^(optimizer|scheduler|scaler|rng_state|training_args)")


class SavedFile(Record):
    """One file of a checkpoint."""

    path: str  # relative to the checkpoint; "" = the checkpoint is this file
    size: int
    mtime: float  # Unix seconds
    damage: str = ""  # see `files.damage`
    needs: Mapping[str, int] | None = None  # see `files.needed`


class Checkpoint(Record):
    """One that was found. `why`: what it lacks, "" = it is complete."""

    name: str  # in its directory
    iteration: int
    why: str
    files: int
    size: int  # bytes
    saved_s: float  # when its last file was written (Unix seconds)
    took_s: float  # from its first file to its last
    names: frozenset[str] = frozenset()  # of its files


def is_checkpoint(files: Sequence[SavedFile]) -> bool:
    """Whether a directory with these files is one at all, and not for example an evaluation of a step."""
    return any(_has_tensors(file.path) or file.path.endswith(".metadata") for file in files)


def iteration_of(name: str, pattern: str | None = None) -> int:
    """The iteration in the name of a checkpoint, -1 = it is none. `pattern`: a regular expression for the whole name,
    whose first group is the iteration; None: the last "step=200", "iter_200", "checkpoint-200", ... counts."""
    if pattern is None:
        return int(([-1] + _NAME.findall(name))[-1])
    found = re.fullmatch(pattern, name)
    return int(found[1]) if found and found.re.groups and (found[1] or "").isdecimal() else -1


def no_iteration(name: str, pattern: str | None) -> str:
    """What to do about a checkpoint whose name tells no iteration, or none by this pattern."""
    numbers = list(re.finditer(r"\d+", name))
    if numbers:
        begin, end = numbers[-1].span()
        wanted = rf"{re.escape(name[:begin])}(\d+){re.escape(name[end:])}"
        if wanted != pattern:
            return (
                f"{name} tells its iteration to --ft-checkpoint-pattern {shlex.quote(wanted)} only"
            )
    return f"{name} has no iteration in its name: save to names like step_100.pt, or leave out --ft-checkpoint-dir"


def examine(
    name: str,
    iteration: int,
    files: Sequence[SavedFile],
    tracker: int | None = None,
    before: Collection[str] = (),
) -> Checkpoint:
    """Judge one checkpoint. `tracker`: what Megatron's tracker file says; `before`: names of the files of the
    checkpoint before it."""
    times = [file.mtime for file in files] or [0.0]
    why = next(_faults(name, iteration, files, tracker, before), "")
    size = sum(file.size for file in files)
    return Checkpoint(
        name, iteration, why, len(files), size, max(times), max(times) - min(times), _names(files)
    )


def _faults(
    name: str,
    iteration: int,
    files: Sequence[SavedFile],
    tracker: int | None,
    before: Collection[str],
) -> Iterator[str]:
    by_path, megatron = (
        {file.path: file for file in files},
        tracker is not None and name.startswith("iter_"),
    )
    if _UNFINISHED.search(name):
        yield "its name is that of an unfinished one"
    if megatron and iteration > (tracker or 0):
        yield f"{TRACKER} says {tracker}"
    for file in files:
        if file.damage:
            yield f"{file.path or name}: {file.damage}"
        yield from _unmet(file, by_path)
    yield from _unmarked_shards(by_path)
    if (
        megatron
        and any(path.endswith(".distcp") for path in by_path)
        and "common.pt" not in by_path
    ):
        yield "common.pt is missing"
    if "training_args.bin" in by_path and "trainer_state.json" not in by_path:
        yield "trainer_state.json is missing"
    if "trainer_state.json" in by_path and not any(
        _has_tensors(p) and not _OF_TRAINER.match(p) for p in by_path
    ):
        yield "it has no model"
    if ".metadata" not in by_path and not megatron:
        for lacking in sorted(set(before) - _names(files))[:1]:
            yield f"{lacking} is missing, which the one before has"


def _unmet(file: SavedFile, by_path: Mapping[str, SavedFile]) -> Iterator[str]:
    folder = file.path[: file.path.rfind("/") + 1]
    for needed, least in (file.needs or {}).items():
        other = by_path.get(folder + needed)
        if other is None:
            yield f"{folder}{needed} is missing"
        elif other.size < least:
            yield f"{folder}{needed} has {other.size} bytes of {least}"


def _has_tensors(path: str) -> bool:
    return path.endswith((*SUFFIXES, ".distcp"))


def _names(files: Sequence[SavedFile]) -> frozenset[str]:
    """Of those with tensors, without the iteration."""
    return frozenset(_NAME.sub("N", file.path) for file in files if file.path.endswith(SUFFIXES))


def _unmarked_shards(by_path: Mapping[str, SavedFile]) -> Iterator[str]:
    """Directories of DCP without their mark. Where each rank saves by itself, each has a mark of its own."""
    for path in (path for path in by_path if path.endswith(".distcp")):
        folder, _, shard = path.rpartition("/")
        folder += "/" if folder else ""
        own = f"{folder}{shard.rpartition('_')[0]}.metadata"
        mark = by_path.get(f"{folder}.metadata", by_path.get(own))
        if mark is None:
            yield f"{folder}.metadata is missing"
        elif mark.mtime < by_path[path].mtime - _CLOCKS_S:
            yield f"{path} is newer than .metadata: a later save did not end"
