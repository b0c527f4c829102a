"""What this agent suspects of its node, left for Slurm's epilog (health.hooks.suspicion): it checks, and drains on its own
evidence only. Files are read and written in a thread that may be left behind in a file system that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import signal
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from nvrx_slurm.agent import faults
from nvrx_slurm.core.job.restarts import headline
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy
from nvrx_slurm.health.hooks import suspicion
from nvrx_slurm.types import FaultKind, RankFault

CLOSE_TIMEOUT_S = 1.0
_MANY_CYCLES = 3
_MAX_WAITING = 64  # for the thread; a file holds no more either
# CUDA's cudaErrorECCUncorrectable and cudaErrorNvlinkUncorrectable, by name and in words -> the check that sees it
_UNCORRECTABLE = re.compile(r"uncorrectable[ _]?(ecc|nvlink)|(ecc|nvlink)[ _]?uncorrectable", re.IGNORECASE)
_CHECKS = {"ecc": "gpu-ecc", "nvlink": "nvlink-errors"}


class Suspicions:
    """One per agent; only `close` waits, and that is bounded. Outside of Slurm, or where our prolog is not installed,
    nothing comes of it.

    `sysroot`: where the site file is that says in which directory (`hooks: suspicions:`).
    """

    def __init__(self, sysroot: str, env: Mapping[str, str] | None = None) -> None:
        self._sysroot = sysroot
        self._env = dict(os.environ if env is None else env)
        self._seen: set[tuple[str, str]] = set()
        self._cycles: set[int] = set()
        self._waiting: queue.Queue[RankFault | tuple[str, str, str] | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._closed = False

    def check_failed(self, check: str, text: str) -> None:
        """A check of the preflight, or a watched one, found this node unfit."""
        self._leave("check-failed", check, text)

    def failed(self, cycle: int, found: Iterable[RankFault]) -> None:
        """Ranks of this node failed of their own accord in `cycle`."""
        self._cycles.add(cycle)
        for fault in found:
            self._put(fault)
            if len(self._cycles) == _MANY_CYCLES:
                many = f"ranks of this node failed in {_MANY_CYCLES} cycles, at last: {headline(fault)}"
                self._leave("repeated-failures", "", many)

    async def close(self) -> None:
        """Have written what is to be written. Bounded, never raises."""
        self._closed = True
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full, queue.Empty):
            if self._waiting.full():
                self._waiting.get_nowait()
            self._waiting.put_nowait(None)
        self._thread = None
        loop = asyncio.get_running_loop()
        written = asyncio.Event()

        def tell() -> None:
            self._done.wait(CLOSE_TIMEOUT_S)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(written.set)

        threading.Thread(target=tell, name="suspicions' end", daemon=True).start()
        await written.wait()

    def _leave(self, kind: str, check: str, text: str) -> None:
        if (kind, check) not in self._seen:
            self._seen.add((kind, check))
            self._put((kind, check, text))

    def _put(self, one: RankFault | tuple[str, str, str]) -> None:
        if self._closed or not self._env.get("SLURM_JOB_ID"):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="suspicions", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(one)
        except queue.Full:
            return  # its file system hangs, and so will ours

    # --- the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            directory = policy.hook_settings(self._sysroot).suspicions
        except UsageError:
            directory = ""  # the checks have said what is wrong with the site file
        while (one := self._waiting.get()) is not None:
            kind, check, text = look_at(one) if isinstance(one, RankFault) else one
            if kind and directory:
                suspicion.leave(kind, text, check, directory, self._env)
        self._done.set()


def look_at(fault: RankFault) -> tuple[str, str, str]:
    """(kind, check, sentence): what a fault says about its node, ("", "", "") if nothing. Reads the end of its log."""
    if fault.kind is FaultKind.SIGNAL and fault.exit_code == -signal.SIGBUS:
        return "uncorrectable-error", "memory-errors", headline(fault)
    text = f"{fault.message}\n{fault.traceback}"
    if not fault.traceback and fault.log:
        text += faults.tail(Path(fault.log))  # abort() of C++ has no traceback
    found = _UNCORRECTABLE.search(text)
    if found is None:
        return "", "", ""
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    line = text[start : end if end >= 0 else None].strip()
    return "uncorrectable-error", _CHECKS[(found[1] or found[2]).lower()], f"{headline(fault)}: {line}"
