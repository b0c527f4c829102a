"""FaultToleranceCallback: heartbeats from the hooks of a Lightning Trainer."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.ptl_resiliency.monitored import MonitoredFit
from nvrx_slurm.ptl_resiliency.simulated_fault import SimulatedFaultParams as SimulatedFaultParams  # NVRx has it here


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
        seen = self.loaded_checkpoint and self._saw_checkpointing and self.train_batches >= self._LEAST_BATCHES
        if self.calculate_timeouts and seen and client.calculate_and_set_hb_timeouts(skip_if_not_ready=True):
            self._save_timeouts(trainer)

    def _beat(self, *_: Any, **__: Any) -> None:
        if self.fault_tol_client is None:
            return  # a validation or a checkpoint outside of a fit
        self.fault_tol_client.send_heartbeat()
        self._beats += 1
        self._saw_checkpointing = self._saw_checkpointing or 0 < self._beats_at_save < self._beats

    on_train_start = on_train_end = _beat
    on_validation_start = on_validation_batch_end = on_validation_end = _beat

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train_batches += 1
        self._beat()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; two in a row are not one long interval."""
        if self.is_initialized:
            self._beat()
            self._beats_at_save = self._beats
