"""Aborts: unblock the main thread from another thread, so that the restart exception can reach it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from nvrx_slurm.inprocess.plugins.compose import PlugIn
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded, connections

logger = logging.getLogger(__name__)

FR_TRACE_PATH_ENV = "NVRX_FR_TRACE_PATH"
_C10D = "torch.distributed.distributed_c10d"
_DCP_PROCESS = "torch.distributed.checkpoint._async_process_executor"
_DUMP_TIMEOUT_S = 5.0
_STEP_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 20.0  # a slower abort of the process groups is abandoned in its thread
# From torch 2.8 on one recorder serves all backends; before, there was only NCCL's.
_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
_WORLD = (  # torch's tables of process groups; 2.13 has `comms` too
    *(
        "pg_map",
        "pg_names",
        "pg_group_ranks",
        "pg_backend_config",
        "pg_to_tag",
        "tags_to_pg",
        "pg_coalesce_state",
    ),
    "comms",
)


class Abort(PlugIn):
    """Base of all aborts. Called from another thread while the main thread may be in a call that never returns.

    The wrapper logs its exceptions and restarts all the same.
    """


@dataclass
class _Memory:
    """What is known from one call of the function to the next."""

    # inodes of connections; None: unknown, so no store's connection is ever cut
    kept: frozenset[int] | None = None
    has_cut: bool = False  # AbortTorchDistributed has run since keep_connections()
    groups: list[Any] = field(default_factory=list)  # aborted groups, see release_groups()


_memory = _Memory()


def keep_connections() -> None:
    """Allow `AbortTorchDistributed` to cut only connections that are opened after this call.

    The wrapper calls it before each call of the function: its own store may be at MASTER_PORT, too.
    """
    _memory.has_cut = False
    _memory.kept = frozenset(connection.inode for connection in connections.open_sockets())


def cut_again() -> None:
    """Repeat the cut of `AbortTorchDistributed`, if it has run: the function may have connected just after it."""
    if _memory.has_cut:
        connections.cut(connections.gloo_sockets())
        _cut_store()


def release_groups() -> None:
    """Drop the last reference to the process groups that `AbortTorchDistributed` has aborted.

    The destructor of a gloo group waits for its threads, and these may need the GIL. A Python reference releases the
    GIL meanwhile. DistributedDataParallel's Reducer does not, so it must not be the last one to hold its group. The
    wrapper calls this when the frames of the function are free.
    """
    _memory.groups.clear()


def forget_half_made_groups() -> None:
    """Reset torch.distributed to the state of a new process, unless it is initialized.

    torch numbers process groups from the call of `init_process_group` on and uses the number in the store's keys. Only
    the destruction of a complete world resets it. Without this reset, ranks that were stopped in that call would never
    meet the others again.
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
    """End all collectives and destroy all process groups of torch.distributed, of every backend.

    Aborts NCCL communicators, cuts gloo's connections, then cuts the connections to MASTER_PORT that the function
    opened: this ends a wait in `init_process_group` or `new_group` (see `keep_connections`). Does nothing if
    torch.distributed is not in use.

    `torch_fr_trace_path`: directory for torch's flight recorder, written before the abort to `<path>/rank_<initial
    rank>_iteration_<n>` in the format of `torchfrtrace`; None: NVRX_FR_TRACE_PATH, without it no dump. (The recorder is
    on with TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE > 0.)
    """

    def __init__(self, torch_fr_trace_path: str | os.PathLike[str] | None = None) -> None:
        self.torch_fr_trace_path = torch_fr_trace_path

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        c10d = sys.modules.get(_C10D)
        if c10d is None or not hasattr(c10d, "is_initialized"):
            return state
        _memory.has_cut = True
        initialized = c10d.is_initialized()
        path = self.torch_fr_trace_path or os.environ.get(FR_TRACE_PATH_ENV)
        if initialized:
            _memory.groups[:] = getattr(getattr(c10d, "_world", None), "pg_map", ())
        if initialized and path:
            _step("dumping the flight recorder", lambda: _dump(Path(path), state), _DUMP_TIMEOUT_S)
        _step("cutting gloo's connections", lambda: connections.cut(connections.gloo_sockets()))
        if initialized:
            _step("aborting the process groups", lambda: _abort_groups(c10d), _ABORT_TIMEOUT_S)
        _step("cutting the store's connections", _cut_store)
        _step("forgetting groups that were being made", forget_half_made_groups)
        return state


class AbortTransformerEngine(Abort):
    """Free TransformerEngine's user buffers and its references to process groups, if it has been imported.

    List it left of `AbortTorchDistributed`, which must run first:
    `Compose(AbortTransformerEngine(), AbortTorchDistributed())`.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        if destroy := _imported("transformer_engine.pytorch.module.base", "destroy_ub"):
            _step("TransformerEngine's destroy_ub", destroy)
        # The module of the quantization state depends on TransformerEngine's version.
        for module in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
            if manager := _imported(module, "FP8GlobalStateManager"):
                _step("TransformerEngine's FP8 state reset", manager.reset)
                break
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Kill the process that `torch.distributed.checkpoint.async_save` keeps (torch 2.7+), if there is one.

    Its process group includes the other ranks' processes, so it is useless after the loss of a rank. The next
    asynchronous save starts a new one. A checkpoint that it was writing stays incomplete.
    """

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises nothing."""
        if _imported(_DCP_PROCESS, "_CHECKPOINT_PROCESS") is not None:
            _step(
                "killing the checkpoint process",
                lambda: _kill_checkpoint_process(sys.modules[_DCP_PROCESS]),
            )
        return state


def _step(what: str, fn: Callable[[], Any], timeout_s: float = _STEP_TIMEOUT_S) -> None:
    """Call `fn` for at most `timeout_s` seconds; log its failure or overrun, raise nothing."""
    began = time.monotonic()
    try:
        bounded.call(fn, timeout_s, f"nvrx abort: {what}")
    except bounded.Overrun:
        logger.warning("abort: %s did not end within %g s and is abandoned", what, timeout_s)
    except Exception as error:
        logger.warning("abort: %s failed: %s: %s", what, type(error).__name__, error)
        logger.debug("abort: %s failed", what, exc_info=True)
    else:
        logger.debug("abort: %s took %.3f s", what, time.monotonic() - began)


def _imported(module: str, name: str) -> Any:
    """The value of this name in a module, None if the module is not imported: an abort imports nothing."""
    return getattr(sys.modules.get(module), name, None)


def _dump(directory: Path, state: FrozenState) -> None:
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
    """Number of connections cut. Called last, since NCCL's abort may still write to the store."""
    port = os.environ.get("MASTER_PORT", "")
    if _memory.kept is None or not (port.isdecimal() and len(port) < 6):
        return 0
    return connections.cut(
        found for found in connections.to_port(int(port)) if found.inode not in _memory.kept
    )


def _abort_groups(c10d: ModuleType) -> None:
    """Abort all groups, which also clears torch's registry; destroy them if that fails or torch is older than 2.6."""
    try:
        c10d._abort_process_group()
    except Exception as error:
        logger.debug("abort: torch's abort of all groups failed, so they are destroyed: %s", error)
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _kill_checkpoint_process(module: ModuleType) -> None:
    process = module._CHECKPOINT_PROCESS._save_process
    process.kill()
    process.join(_STEP_TIMEOUT_S)
    module._CHECKPOINT_PROCESS = None  # type: ignore[attr-defined]
