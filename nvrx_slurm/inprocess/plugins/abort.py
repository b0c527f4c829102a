"""Ending what the main thread may be stuck in, from another thread, so that the restart exception can reach it."""

from __future__ import annotations

import datetime
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nvrx_slurm.inprocess.checks import check_time
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded, connections

logger = logging.getLogger(__name__)

FR_TRACE_PATH_ENV = "NVRX_FR_TRACE_PATH"
_C10D = "torch.distributed.distributed_c10d"
_DCP_PROCESS = "torch.distributed.checkpoint._async_process_executor"
_DUMP_TIMEOUT_S = 5.0
_STEP_TIMEOUT_S = 10.0
# torch 2.8+ has one recorder for all backends; before, only NCCL's.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
_WORLD = (  # torch's tables of process groups; 2.13 has `comms` too
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state"),
    "comms",
)


class Abort(ABC):
    """Called from a thread that is not the main one, while the main thread may be inside a call that never returns.

    What it raises is logged and changes nothing: the restart goes on with or without it.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """End what blocks the main thread; returns `state`."""


def keep_connections() -> None:
    """Spare the connections of this process that are open now: `AbortTorchDistributed` may cut those opened later.

    For the wrapper, whose own store may be at MASTER_PORT too: to be called before each call of the wrapped function.
    """
    global _kept, _has_cut
    _has_cut = False
    _kept = frozenset(connection.inode for connection in connections.open_sockets())


_kept: frozenset[int] | None = None  # inodes; None: nobody said, so no store's connection is ever cut
_has_cut = False  # AbortTorchDistributed has, since then


def cut_again() -> None:
    """For who waits until the function has ended: it may have been about to connect when `AbortTorchDistributed` ended
    what there was, and then waits in C."""
    if _has_cut:
        connections.cut(connections.gloo_sockets())
        _cut_store()


def forget_half_made_groups() -> None:
    """Where torch.distributed is not initialized it has the state of a new process, whatever was begun before.

    torch numbers process groups from the moment `init_process_group` is called, and takes the count back only when a
    world that was complete is destroyed; the number is part of the keys in the store, so ranks that have been stopped
    in that call would never again meet those that have not.
    """
    c10d = sys.modules.get(_C10D)
    world = getattr(c10d, "_world", None)
    if c10d is None or world is None or c10d.is_initialized():
        return
    tables = [table for name in _WORLD if (table := getattr(world, name, None))]
    for table in tables:
        table.clear()
    if tables and (unregister := getattr(c10d, "_unregister_all_process_groups", None)):
        unregister()
    if getattr(world, "group_count", 0):
        world.group_count = 0


class AbortTorchDistributed(Abort):
    """Ends all collectives and destroys all process groups of torch.distributed, of every backend.

    NCCL communicators are aborted, and gloo's connections are cut; then those to MASTER_PORT that the wrapped function
    opened are, which ends a wait for other ranks in `init_process_group` or `new_group` (see `keep_connections`).
    Does nothing where torch.distributed is not in use.

    `torch_fr_trace_path`: a directory; before the abort NCCL's flight recorder is written to `<path>/rank_<initial
    rank>_iteration_<n>`, in the format of `torchfrtrace`. None: NVRX_FR_TRACE_PATH; neither: no dump. (The recorder is
    on with TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE > 0.)
    `timeout`: an abort that takes longer is left behind in its thread, with a warning. Raises TypeError for values of
    other types, ValueError for a timeout of 0 or less.
    """

    def __init__(
        self,
        torch_fr_trace_path: str | os.PathLike[str] | None = None,
        *,
        timeout: datetime.timedelta = datetime.timedelta(seconds=20),
    ) -> None:
        if torch_fr_trace_path is not None and not isinstance(torch_fr_trace_path, (str, os.PathLike)):
            raise TypeError(f"AbortTorchDistributed: torch_fr_trace_path must be a path, not {torch_fr_trace_path!r}")
        check_time("AbortTorchDistributed: timeout", timeout)
        self.torch_fr_trace_path = torch_fr_trace_path
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        c10d = sys.modules.get(_C10D)
        if c10d is None or not hasattr(c10d, "is_initialized"):
            return state
        global _has_cut
        _has_cut = True
        initialized = c10d.is_initialized()
        path = self.torch_fr_trace_path or os.environ.get(FR_TRACE_PATH_ENV)
        if initialized and path:
            _step("dumping the flight recorder", lambda: _dump(c10d, Path(path), state), _DUMP_TIMEOUT_S)
        _step("cutting gloo's connections", lambda: connections.cut(connections.gloo_sockets()), _STEP_TIMEOUT_S)
        if initialized:
            _step("aborting the process groups", lambda: _abort_groups(c10d), self.timeout.total_seconds())
        _step("cutting the store's connections", _cut_store, _STEP_TIMEOUT_S)
        _step("forgetting groups that were being made", forget_half_made_groups, _STEP_TIMEOUT_S)
        return state


class AbortTransformerEngine(Abort):
    """Frees TransformerEngine's user buffers and its references to process groups, where it has been imported.

    Compose it left of `AbortTorchDistributed`, which must run first (seed 002):
    `Compose(AbortTransformerEngine(), AbortTorchDistributed())`.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        if destroy := _found("transformer_engine.pytorch.module.base", "destroy_ub"):
            _step("TransformerEngine's destroy_ub", destroy, _STEP_TIMEOUT_S)
        # Where the quantization state lives depends on TransformerEngine's version.
        for module in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
            if manager := _found(module, "FP8GlobalStateManager"):
                _step("TransformerEngine's FP8 state reset", manager.reset, _STEP_TIMEOUT_S)
                break
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Kills the process that `torch.distributed.checkpoint.async_save` keeps, where there is one (torch 2.7+).

    It holds a process group of its own with the other ranks' processes, so it is of no use after a rank is lost. The
    next asynchronous save starts another. What it was writing stays unfinished.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        module = sys.modules.get(_DCP_PROCESS)
        if module is not None and getattr(module, "_CHECKPOINT_PROCESS", None) is not None:
            _step("killing the checkpoint process", lambda: _kill_checkpoint_process(module), _STEP_TIMEOUT_S)
        return state


def _step(what: str, fn: Callable[[], Any], timeout_s: float) -> None:
    """Run it with a bound; whatever goes wrong is said, never raised."""
    began = time.monotonic()
    try:
        result = bounded.call(fn, timeout_s, f"nvrx abort: {what}")
    except bounded.Overrun:
        logger.warning("abort: %s did not end within %g s and is left behind", what, timeout_s)
    except Exception as error:
        logger.warning("abort: %s failed: %s: %s", what, type(error).__name__, error)
        logger.debug("abort: %s failed", what, exc_info=True)
    else:
        count = "" if result is None else f" ({result})"
        logger.debug("abort: %s%s took %.3f s", what, count, time.monotonic() - began)


def _found(module: str, name: str) -> Any:
    """That name of a module that somebody has imported, else None: an abort imports nothing."""
    return getattr(sys.modules.get(module), name, None)


def _dump(c10d: ModuleType, directory: Path, state: FrozenState) -> None:
    bindings = sys.modules["torch._C._distributed_c10d"]
    dump = next((getattr(bindings, name) for name in _DUMPS if hasattr(bindings, name)), None)
    if dump is None:
        logger.debug("abort: this torch has no flight recorder")
        return
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"rank_{state.initial_rank}_iteration_{state.iteration}"
    file.write_bytes(dump())
    logger.info("flight recorder written to %s", file)


def _cut_store() -> int:
    """Last, since NCCL's abort may still write to the store."""
    port = os.environ.get("MASTER_PORT", "")
    if _kept is None or not (port.isdecimal() and len(port) < 6):
        return 0
    return connections.cut(found for found in connections.to_port(int(port)) if found.inode not in _kept)


def _abort_groups(c10d: ModuleType) -> None:
    """With torch 2.6+ an abort of all groups, which clears torch's registry too; before, or if it fails, a destroy."""
    if hasattr(c10d, "_abort_process_group"):
        try:
            c10d._abort_process_group()
        except Exception as error:
            logger.debug("abort: torch's abort of all groups failed, so they are destroyed: %s", error)
    else:
        logger.debug("abort: this torch cannot abort process groups, so they are destroyed")
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _kill_checkpoint_process(module: ModuleType) -> None:
    process = module._CHECKPOINT_PROCESS._save_process
    process.kill()
    process.join(_STEP_TIMEOUT_S)
    module._CHECKPOINT_PROCESS = None  # type: ignore[attr-defined]
