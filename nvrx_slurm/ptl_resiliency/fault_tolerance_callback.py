"""FaultToleranceCallback: heartbeats from the hooks of a Lightning Trainer; and what it shares with sections.

That is the client's life in a fit, the file with learned timeouts, and the flag of a finished job.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.monitor import unmonitored
from nvrx_slurm.monitor.distributed import is_initialized

# NVRx has it here
from nvrx_slurm.ptl_resiliency.simulated_fault import SimulatedFaultParams as SimulatedFaultParams
from nvrx_slurm.ptl_resiliency.simulated_fault import arm
from nvrx_slurm.system.files import write_atomic

FINISHED_FLAG_ENV = "FAULT_TOL_FINISHED_FLAG_FILE"
_PACKAGES = {
    "lightning": "lightning.pytorch.callbacks",
    "pytorch_lightning": "pytorch_lightning.callbacks",
}


def _callback_class() -> Any:
    """Lightning's Callback, from the package that the script has imported, else from the installed one."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(_PACKAGES[package]).Callback
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != package:
                raise
    raise ImportError("the callbacks need PyTorch Lightning: pip install 'nvrx_slurm[lightning]'")


Callback: Any = _callback_class()


class MonitoredFit(Callback):
    """A fit with a RankMonitorClient; the base of both callbacks.

    Active in `fit` only. The Trainer must be started by nvrx-run (or within `standalone_monitor()`).
    """

    TIMEOUTS_FILENAME = "_ft_state.json"
    FT_DIR_NAME = "ft_state"

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
    ) -> None:
        self.logger = logging.getLogger(logger_name)
        self.fault_tol_client: RankMonitorClient | None = None
        self.autoresume = autoresume
        self.calculate_timeouts = calculate_timeouts
        self.simulated_fault_params = (
            SimulatedFaultParams(**simulated_fault_params)
            if isinstance(simulated_fault_params, Mapping)
            else simulated_fault_params
        )
        self.exp_dir = exp_dir
        self.timeouts_file_path: Path | None = None
        self.train_batches = 0
        self.loaded_checkpoint = False

    @property
    def is_initialized(self) -> bool:
        """Whether a fit is being monitored right now."""
        return self.fault_tol_client is not None

    # --- hooks of Lightning -------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect to the rank monitor. Raises RankMonitorClientError, or ValueError for a missing `exp_dir`."""
        if stage != "fit" or unmonitored.is_wanted():
            return
        if self.autoresume and not os.environ.get(FINISHED_FLAG_ENV):
            raise RankMonitorClientError(
                f"autoresume needs {FINISHED_FLAG_ENV}: the job's script must export it"
            )
        if self.calculate_timeouts:
            if not is_initialized():
                raise RankMonitorClientError(
                    "calculate_timeouts needs a process group, of one rank at least: Trainer(strategy='ddp')"
                )
            self.timeouts_file_path = self._state_dir(trainer) / self.TIMEOUTS_FILENAME
        self.train_batches = 0
        self.loaded_checkpoint = False
        client = RankMonitorClient()
        client.init_workload_monitoring()
        self.fault_tol_client = client
        self._load_timeouts()
        try:
            self._begin(client)
        except RankMonitorClientError:
            self._disconnect()
            raise
        if self.simulated_fault_params is not None:
            arm(self.simulated_fault_params, trainer.global_rank, trainer.world_size)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit ended without an exception."""
        if stage != "fit" or self.fault_tol_client is None:
            return
        if self.autoresume and trainer.is_global_zero and self._is_completed(trainer):
            self._flag_finished()
        self._end(self.fault_tol_client, trainer)
        self._disconnect()

    def on_load_checkpoint(self, *_: Any, **__: Any) -> None:
        """A load makes the start longer: only then can the start's timeout be learned."""
        self.loaded_checkpoint = self.loaded_checkpoint or self.is_initialized

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit ends early: in order after `sys.exit(0)` of a callback, else as a failure.

        Lightning's SIGTERMException is a SystemExit, too: the launcher stops this rank, and other ranks may be dead.
        """
        if self.fault_tol_client is None:
            return
        if type(exception) is SystemExit and not exception.code:
            self._end(self.fault_tol_client, trainer)
        else:
            self._fail(self.fault_tol_client, trainer, exception)
        self._disconnect()

    # --- for the callbacks --------------------------------------------------------------------------------------

    def _begin(self, client: RankMonitorClient) -> None:
        """The fit begins."""

    def _end(self, client: RankMonitorClient, trainer: Any) -> None:
        """The fit is over, on all ranks."""

    def _fail(self, client: RankMonitorClient, trainer: Any, exception: BaseException) -> None:
        """This rank failed; nothing collective may be called."""

    def _save_timeouts(self, trainer: Any) -> None:
        """Save the calculated timeouts. They are the same on all ranks, so rank 0 writes them."""
        assert self.fault_tol_client is not None and self.timeouts_file_path is not None
        if not trainer.is_global_zero:
            return
        self.logger.info("timeouts calculated: %s", self.fault_tol_client.state_dict())
        write_atomic(
            self.timeouts_file_path, json.dumps(self.fault_tol_client.state_dict()).encode()
        )

    # --- inside -------------------------------------------------------------------------------------------------

    def _state_dir(self, trainer: Any) -> Path:
        if self.exp_dir is not None:
            directory = Path(self.exp_dir)
        else:
            directory = Path(trainer.log_dir) / self.FT_DIR_NAME
            if trainer.is_global_zero:
                directory.mkdir(parents=True, exist_ok=True)
            trainer.strategy.barrier()
        if not directory.is_dir():
            raise ValueError(f"the directory for learned timeouts does not exist: {directory}")
        return directory

    def _load_timeouts(self) -> None:
        path = self.timeouts_file_path
        if self.fault_tol_client is None or path is None or not path.exists():
            return
        try:
            self.fault_tol_client.load_state_dict(json.loads(path.read_text()))
        except (OSError, ValueError, RankMonitorClientError) as error:
            self.logger.warning("%s is not used, timeouts are the configured ones: %s", path, error)

    def _is_completed(self, trainer: Any) -> bool:
        """Whether the training is complete; a fit of at most one batch was complete at its start."""
        if self.train_batches <= 1:
            return True
        limits = (
            (trainer.max_steps, trainer.global_step),
            (trainer.max_epochs, trainer.current_epoch),
        )
        return any(isinstance(limit, int) and 0 < limit <= reached for limit, reached in limits)

    def _flag_finished(self) -> None:
        try:
            Path(os.environ[FINISHED_FLAG_ENV]).touch()
        except (KeyError, OSError) as error:
            self.logger.error("the flag of the finished job cannot be written: %s", error)

    def _disconnect(self) -> None:
        if self.fault_tol_client is not None:
            self.fault_tol_client.shutdown_workload_monitoring()
            self.fault_tol_client = None


class FaultToleranceCallback(MonitoredFit):
    """Sends a heartbeat after each training and validation batch of a fit, and around epochs and checkpoints.

    `autoresume`: when the training is complete, rank 0 creates the file named by FAULT_TOL_FINISHED_FLAG_FILE, for the
    script that starts the next job. `calculate_timeouts`: at the end of a fit that loaded and saved a checkpoint,
    replace the heartbeat timeouts by calculated ones and save them for the next fits. `simulated_fault_params`: a fault
    to inject, for tests. `exp_dir`: an existing directory, shared by all jobs, for the calculated timeouts; None:
    `ft_state` in the Trainer's log_dir. `logger_name`: name of the logger to use.

    The hooks raise RankMonitorClientError without a rank monitor, or without a timeout, configured or calculated.
    """

    _LEAST_BATCHES = 2

    def _begin(self, client: RankMonitorClient) -> None:
        self._beats = 0
        self._beats_at_save = 0  # before the last checkpoint was written
        self._saw_checkpointing = False
        if not self.calculate_timeouts and not client.hb_timeouts.are_valid:
            raise RankMonitorClientError(
                "FaultToleranceCallback needs --ft-initial-rank-heartbeat-timeout and --ft-rank-heartbeat-timeout, or "
                "calculate_timeouts=True"
            )

    def _end(self, client: RankMonitorClient, trainer: Any) -> None:
        self._beat()
        # Checkpoints make the longest intervals: without them, the timeouts would be too short.
        seen = (
            self.loaded_checkpoint
            and self._saw_checkpointing
            and self.train_batches >= self._LEAST_BATCHES
        )
        if (
            self.calculate_timeouts
            and seen
            and client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        ):
            self._save_timeouts(trainer)

    def _beat(self, *_: Any, **__: Any) -> None:
        if self.fault_tol_client is None:
            return  # a validation or a checkpoint outside of a fit
        self.fault_tol_client.send_heartbeat()
        self._beats += 1
        self._saw_checkpointing = self._saw_checkpointing or 0 < self._beats_at_save < self._beats

    on_train_start = on_train_end = _beat
    on_validation_start = on_validation_batch_end = on_validation_end = _beat

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.train_batches += 1
        self._beat()

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Called before a checkpoint is written; two in a row are not one long interval."""
        if self.is_initialized:
            self._beat()
            self._beats_at_save = self._beats
