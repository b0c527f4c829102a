"""FaultToleranceSectionsCallback: sections from the hooks of a Lightning Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError, WorkloadAction
from nvrx_slurm.ptl_resiliency.fault_tolerance_callback import MonitoredFit
from nvrx_slurm.ptl_resiliency.simulated_fault import SimulatedFaultParams

if TYPE_CHECKING:
    from nvrx_slurm.fault_tolerance import WorkloadControlRequest

SETUP, STEP, CHECKPOINTING = SECTIONS = ("setup", "step", "checkpointing")


class FaultToleranceSectionsCallback(MonitoredFit):
    """Divides a fit into three sections, which all need a value in `rank_section_timeouts`.

    "setup": until the first training or validation batch. "step": each of these batches, with backward and optimizer.
    "checkpointing": the strategy writes, finalizes or removes a checkpoint. The rest is time in no section.

    `calculate_timeouts`: after a checkpoint, and at the end of the fit, replace timeouts by calculated ones: "setup" if
    a checkpoint was loaded, "step" after MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE batches, "checkpointing" if a checkpoint
    was written and not in the background; time in no section at the end of a fit with all of these. The other arguments
    are those of FaultToleranceCallback.

    `exc_handling_policy(exception)`: called on a rank where the fit fails, not where the launcher stops it; returns the
    WorkloadControlRequest to send, None = nothing. A ShutdownWorkload also creates the file of `autoresume`, so that
    the script starts no other job. Its errors are logged; the fit ends with its own exception.
    """

    MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE = 16
    TIMEOUTS_FILENAME = "_ft_state_.json"

    def __init__(
        self,
        autoresume: bool,
        calculate_timeouts: bool,
        simulated_fault_params: SimulatedFaultParams | Mapping[str, Any] | None = None,
        exp_dir: str | os.PathLike[str] | None = None,
        logger_name: str | None = "nemo_logger.FaultToleranceCallback",
        exc_handling_policy: Callable[[BaseException], WorkloadControlRequest | None] | None = None,
    ) -> None:
        super().__init__(
            autoresume, calculate_timeouts, simulated_fault_params, exp_dir, logger_name
        )
        self.exc_handling_policy = exc_handling_policy
        self._depth: dict[str, int] = dict.fromkeys(SECTIONS, 0)
        self._saved = False  # a checkpoint was written in this fit
        self._saved_since_update = False
        self._saves_in_background = False
        self._wrapped: list[tuple[Any, str, Any]] = []

    # --- the fit ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Connect, begin section "setup". Raises RankMonitorClientError as well where a section has no entry."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            strategy = trainer.strategy
            self._wrap(strategy, "save_checkpoint")
            self._wrap(strategy, "remove_checkpoint")
            self._saves_in_background = self._wrap(
                strategy.checkpoint_io, "maybe_finalize_save_checkpoint"
            )

    def _begin(self, client: RankMonitorClient) -> None:
        if missing := [name for name in SECTIONS if name not in client.section_timeouts.section]:
            raise RankMonitorClientError(
                f"FaultToleranceSectionsCallback needs {', '.join(missing)} in --ft-rank-section-timeouts, for example "
                "setup:600,step:30,checkpointing:300"
            )
        self._depth = dict.fromkeys(SECTIONS, 0)
        self._saved = self._saved_since_update = False
        self._start(SETUP)

    def _end(self, client: RankMonitorClient, trainer: Any) -> None:
        client.end_all_sections()
        self._learn(client, trainer, final=True)

    def _fail(self, client: RankMonitorClient, trainer: Any, exception: BaseException) -> None:
        client.end_all_sections()
        # SIGTERMException
        stopped = isinstance(exception, SystemExit) and type(exception) is not SystemExit
        if self.exc_handling_policy is None or stopped:
            return
        try:
            request = self.exc_handling_policy(exception)
            if request is None:
                return
            client.send_workload_control_request(request)
        except Exception:
            self.logger.exception(
                "exc_handling_policy for %r failed, nothing was asked for", exception
            )
            return
        self.logger.warning(
            "asked for %s after %r: %s", request.action.name, exception, request.description
        )
        if self.autoresume and request.action is WorkloadAction.ShutdownWorkload:
            self._flag_finished()  # on whichever rank this is

    def _disconnect(self) -> None:
        while self._wrapped:
            owner, name, before = self._wrapped.pop()
            if before is None:
                delattr(owner, name)  # the instance's: the class's is seen again
            else:
                setattr(owner, name, before)
        super()._disconnect()

    # --- sections -----------------------------------------------------------------------------------------------

    def _start(self, section: str) -> None:
        if self.fault_tol_client is None:
            return
        self._depth[section] += 1
        if self._depth[section] == 1:
            self.fault_tol_client.start_section(section)

    def _stop(self, section: str) -> None:
        """End a section; does nothing if it is not open: a batch may be skipped, and a setup ends only once."""
        if self.fault_tol_client is None or not self._depth[section]:
            return
        self._depth[section] -= 1
        if not self._depth[section]:
            self.fault_tol_client.end_section(section)

    def _wrap(self, owner: Any, name: str) -> bool:
        """Wrap a method of one object in section "checkpointing" until the fit ends."""
        method = getattr(owner, name, None)
        if method is None:
            return False

        @wraps(method)
        def in_section(*args: Any, **kwargs: Any) -> Any:
            # may be nested: writing a checkpoint may remove an older one
            self._start(CHECKPOINTING)
            result = method(*args, **kwargs)
            self._stop(CHECKPOINTING)  # not after an exception: then all sections end together
            return result

        self._wrapped.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, in_section)
        return True

    def _learn(self, client: RankMonitorClient, trainer: Any, final: bool) -> None:
        """Collective: all ranks call it at the same batches, after the same kinds of events."""
        if not self.calculate_timeouts:
            return
        seen = {
            SETUP: self.loaded_checkpoint,
            STEP: self.train_batches > self.MIN_TR_ITERS_FOR_STEP_TIMEOUT_UPDATE,
            CHECKPOINTING: self._saved and not self._saves_in_background,
        }
        outside = final and seen[SETUP] and seen[STEP] and self._saved
        selected = [section for section in SECTIONS if seen[section]]
        if not selected:
            return
        if client.calculate_and_set_section_timeouts(
            selected, calc_out_of_section=outside, skip_if_not_ready=True
        ):
            self._save_timeouts(trainer)

    # --- hooks of Lightning -------------------------------------------------------------------------------------

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._stop(SETUP)
        self.train_batches += 1
        self._start(STEP)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._stop(STEP)
        if self._saved_since_update and self.fault_tol_client is not None:
            self._saved_since_update = False
            self._learn(self.fault_tol_client, trainer, final=False)

    def on_train_epoch_end(self, *_: Any) -> None:
        self._stop(STEP)  # the section of a batch that the model skipped

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._stop(SETUP)
        self._start(STEP)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._stop(STEP)

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Called before a checkpoint is written."""
        if self.is_initialized:
            self._saved = self._saved_since_update = True
