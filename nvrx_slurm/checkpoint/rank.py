"""The rank's side: copies of its state into the keeper's memory, and back.

Which iteration is loaded is the same on all ranks: the newest that each of them has, undamaged.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint import tree
from nvrx_slurm.checkpoint.link import (
    CheckpointError,
    KeeperGone,
    Link,
    address,
    launcher_pid,
    start,
)
from nvrx_slurm.checkpoint.telling import Monitor
from nvrx_slurm.core.checkpoint import loading
from nvrx_slurm.core.checkpoint.loading import Found
from nvrx_slurm.core.checkpoint.memory import GENERATIONS
from nvrx_slurm.monitor import distributed
from nvrx_slurm.monitor.transport import RankMonitorClientError
from nvrx_slurm.records import Loaded

_LOG = logging.getLogger("nvrx_slurm.checkpoint")
_lock = threading.RLock()
_RETRY_S = 60.0
_MAPPED = GENERATIONS + 1  # one more, where copies take longer than a save
_MESSAGE_CHARS = 300
_LOADS = 16  # numbers of saves for each cycle: one after each load

A = TypeVar("A")


class _Keeper:
    """This process's link, and the memory that it has mapped."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._link: Link | None = None
        self.warned = False  # that saves fail, since the last one that did not
        self.retry_at = 0.0  # no save asks a keeper that does not answer before
        self._mapped: dict[int, tree.Mapped] = {}  # by inode, in the order of use
        self._monitor: Monitor | None = None
        self.after = (
            0  # what is done again after a load is another save than all that ranks had then
        )

    def monitor(self) -> Monitor:
        """The rank monitor, once there is something to tell it."""
        self._monitor = self._monitor or Monitor()
        return self._monitor

    def link(self, begin: bool) -> Link:
        """`begin`: start the keeper where there is none. Raises CheckpointError."""
        launcher = launcher_pid(os.environ)
        followed = launcher if launcher > 1 else self.pid  # init does not end with the job
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        cycle = max(_LOADS * _cycle(), self.after)
        joins = m.Join(*_place(), local_world, followed, cycle)
        if self._link is not None and self._link.joins == joins:
            return self._link
        self.drop()
        name = address(os.environ, launcher)
        try:
            self._link = Link(name, joins)
        except KeeperGone:
            if not begin:
                raise
            start(name, os.environ, followed)
            self._link = Link(name, joins)
        return self._link

    def ask(self, request: m.Request, kind: type[A]) -> tuple[A, int]:
        """As `Link.ask`, of a keeper that runs. Once more over a new link, where the old one has ended."""
        try:
            return self.link(begin=False).ask(request, kind)
        except KeeperGone:
            self.drop()
            return self.link(begin=False).ask(request, kind)

    def drop(self) -> None:
        """Forget the link and the memory; the next call makes them anew."""
        if self._link is not None:
            self._link.close()
        self._link, self._mapped = None, {}

    def unmap_smaller(self, size: int) -> None:
        """Memory that is to be replaced by larger one is free only when nobody has it mapped."""
        self._mapped = {inode: one for inode, one in self._mapped.items() if len(one.pages) >= size}

    def map(self, fd: int) -> tree.Mapped:
        """The bytes of a descriptor, which is closed. Pages are there at once: later copies take no faults."""
        try:
            status = os.fstat(fd)
            found = self._mapped.pop(status.st_ino, None)
            if found is None:
                pages = mmap.mmap(fd, status.st_size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                found = tree.Mapped(pages)
        finally:
            os.close(fd)
        self._mapped[status.st_ino] = found
        while len(self._mapped) > _MAPPED:
            del self._mapped[next(iter(self._mapped))]
        return found


_keeper = _Keeper()


def _of_this_process() -> _Keeper:
    global _keeper
    if _keeper.pid != os.getpid():  # forked: the connection is the parent's
        _keeper = _Keeper()
    return _keeper


def _place() -> tuple[int, int]:
    """Rank and number of ranks."""
    if distributed.is_initialized():
        rank, others = distributed.place()
        return rank, others + 1
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def _cycle() -> int:
    return int(os.environ.get("NVRX_CYCLE") or 0)


def save(state: Any, iteration: int) -> bool:
    """See `checkpoint.save`."""
    if not isinstance(iteration, int) or not 0 <= iteration < 1 << 62:
        raise CheckpointError(f"an iteration is a whole number >= 0, not {iteration!r}")
    flat = tree.flatten(state)
    with _lock:
        if time.monotonic() < _of_this_process().retry_at:
            return False
        try:
            try:
                _copy(flat, iteration)
            except KeeperGone:  # it was killed, with all that it held
                _of_this_process().drop()
                _copy(flat, iteration)
        except (CheckpointError, OSError) as error:
            if not _keeper.warned:
                _LOG.warning(
                    "checkpoints are not kept in memory from iteration %d on: %s", iteration, error
                )
            _keeper.warned = True
            if isinstance(error, KeeperGone):
                _keeper.retry_at = time.monotonic() + _RETRY_S
            return False
        _keeper.warned = False
        _keeper.monitor().is_at(iteration, saved=True)
    return True


def _copy(flat: tree.Flat, iteration: int) -> None:
    keeper = _of_this_process()
    link, size = keeper.link(begin=True), flat.size + len(flat.tree)
    keeper.unmap_smaller(size)
    _, fd = link.ask(m.AskSpace(iteration, size), m.Space)
    flat.copy_to(keeper.map(fd))
    link.ask(m.SaveDone(), m.Accepted)


def available() -> int | None:
    """See `checkpoint.available`."""
    with _lock:
        saves, _, _ = _common(_held())
    return saves[0][1] if saves else None


def load(state: Any = None) -> tuple[Any, int] | None:
    """See `checkpoint.load`."""
    began_s = time.monotonic()
    parts: list[int] = []
    found = None
    with _lock:
        saves, why, newest = _common(_held())
        said = [] if saves else [why]
        for save in saves:
            part, fill = _fetched(save, tree.ABSENT if state is None else state)
            parts = _told_to_all(int(part))
            said.append(loading.outcome(save[1], parts))
            if min(parts) > 0:
                assert fill is not None
                found = fill(), save[1]
                break
        _of_this_process().after = newest + 1
        _tell(-1 if found is None else found[1], loading.source(parts), began_s, "; ".join(said))
    return found


def _tell(iteration: int, source: str, began_s: float, message: str) -> None:
    """Say what `load` has found: each rank in its log, the first one to the coordinator."""
    cycle = _cycle()
    if message == loading.NOTHING and not cycle:
        return  # the job begins
    monitor = _of_this_process().monitor()
    if iteration < 0:
        path = os.environ.get("NVRX_RESUME_FROM")
        message += f": read the disk ({path})" if path else ": read the disk"
    else:
        monitor.is_at(iteration, saved=False)
    if iteration < 0 or ";" in message:
        _LOG.warning("%s", message)
    if _place()[0] == 0:
        took_s = time.monotonic() - began_s
        monitor.tell(Loaded(cycle, iteration, source, took_s, message[:_MESSAGE_CHARS]))


def _held() -> tuple[list[m.Save], int]:
    """Saves of this rank, newest first (with NVRX_RESUME_BEFORE, only those that are older); and `HeldSaves.other`."""
    before = int(os.environ.get("NVRX_RESUME_BEFORE") or 1 << 62)
    try:
        answer, _ = _of_this_process().ask(m.AskHeld(), m.HeldSaves)
    except KeeperGone:
        return [], 0
    except CheckpointError as error:
        _LOG.warning("nothing is loaded from memory: %s", error)
        return [], 0
    return [save for save in answer.saves if save[1] < before], answer.other


def _common(own: tuple[list[m.Save], int]) -> tuple[list[m.Save], str, int]:
    """Saves that all ranks have, newest first, or why there are none; and the newest cycle that any rank has."""
    held, other = own
    told = _told_to_all((held, other))
    saves = [[(cycle, iteration) for cycle, iteration in one] for one, _ in told]
    newest = max((cycle for one in saves for cycle, _ in one), default=-1)
    return loading.common(saves), loading.nothing(saves, [one for _, one in told]), newest


def _fetched(save: m.Save, state: Any) -> tuple[Found, Callable[[], Any] | None]:
    """What fills the state; None, and a warning: it is damaged, or does not fit."""
    part = Found.LOST
    try:
        keeper = _of_this_process()
        saved, fd = keeper.ask(m.AskSaved(save), m.Saved)
        mapped = keeper.map(fd)
        part = Found.MISFIT
        root = tree.unpacked(mapped.pages, saved.size)
        fitting = tree.Fitting(root, state)
        return Found.COPY if saved.is_copy else Found.MEMORY, partial(fitting.fill, mapped.memory)
    except (CheckpointError, OSError) as error:
        _LOG.warning("iteration %d is not loaded from memory: %s", save[1], error)
        return part, None


def _told_to_all(mine: A) -> list[A]:
    """What each rank tells, as JSON has it. Raises CheckpointError where ranks cannot tell each other."""
    rank, world = _place()
    if world == 1:
        return [mine]
    if not distributed.is_initialized():
        raise CheckpointError(
            f"rank {rank} of {world} cannot tell which iteration the others have; call "
            "torch.distributed.init_process_group before checkpoint.load"
        )
    try:
        return [json.loads(one) for one in distributed.texts_of_all(json.dumps(mine))]
    except RankMonitorClientError as error:
        raise CheckpointError(str(error)) from error
