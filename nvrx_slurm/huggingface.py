"""A callback that monitors the ranks of a Hugging Face Trainer, without a change to the training.

    from nvrx_slurm.huggingface import FaultToleranceCallback

    trainer = Trainer(callbacks=[FaultToleranceCallback(calculate_timeouts=True)], ...)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None)

Needs transformers (extra `transformers`).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.system.files import write_atomic

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "the callback needs transformers: pip install 'nvrx_slurm[transformers]'"
    ) from None

TIMEOUTS_FILENAME = "ft_state.json"
_log = logging.getLogger(__name__)


class FaultToleranceCallback(TrainerCallback):
    """Sends a heartbeat after each step and each batch of an evaluation, and around checkpoints.

    After a warning of the launcher (time limit, preemption) all ranks save a checkpoint after the same step, and
    `train()` returns. `ask_every` (>= 1): steps between two such questions; each costs an all_reduce of 8 bytes.
    `calculate_timeouts`: in a run that was resumed, replace the heartbeat timeouts by calculated ones after each
    checkpoint but the first, and at the end; `output_dir`/ft_state.json, which all nodes must see, keeps them.

    `on_train_begin` raises RankMonitorClientError without a rank monitor.
    """

    def __init__(self, calculate_timeouts: bool = False, ask_every: int = 1) -> None:
        self.calculate_timeouts = calculate_timeouts
        self.ask_every = ask_every
        self._client: RankMonitorClient | None = None
        self._resumed = self._saved = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Connect to the rank monitor, with the timeouts of former runs."""
        client = RankMonitorClient()
        client.init_workload_monitoring()
        self._client = client
        self._resumed = state.global_step > 0
        self._saved = False
        path = Path(args.output_dir, TIMEOUTS_FILENAME)
        if self.calculate_timeouts and path.exists():
            try:
                client.load_state_dict(json.loads(path.read_text()))
            except (OSError, ValueError, RankMonitorClientError) as error:
                _log.warning("%s is not used, timeouts are the configured ones: %s", path, error)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Progress; and all ranks together: is it time to save and leave?"""
        self._beat()
        if self._client is not None and self._client.should_stop_together(every=self.ask_every):
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called on all ranks after a checkpoint. The first one was not seen yet as an interval of heartbeats."""
        self._learn(args, state)
        self._beat()
        self._saved = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """`train()` returns without an exception."""
        self._beat()
        self._learn(args, state)
        if self._client is not None:
            self._client.shutdown_workload_monitoring()
            self._client = None

    def _beat(self, *_: Any, **__: Any) -> None:
        if self._client is not None:  # else an evaluation outside of train()
            self._client.send_heartbeat()

    on_substep_end = on_prediction_step = on_evaluate = _beat

    def _learn(self, args: Any, state: Any) -> None:
        """Collective. A load of a checkpoint, and a checkpoint, make the longest intervals: both must be in them."""
        client = self._client
        if client is None or not (self.calculate_timeouts and self._resumed and self._saved):
            return
        if (
            client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
            and state.is_world_process_zero
        ):
            write_atomic(
                Path(args.output_dir, TIMEOUTS_FILENAME), json.dumps(client.state_dict()).encode()
            )
