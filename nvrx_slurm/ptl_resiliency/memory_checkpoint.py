"""MemoryCheckpoint: a Lightning Trainer whose state outlives its process in memory."""

from __future__ import annotations

from typing import Any

from nvrx_slurm import checkpoint
from nvrx_slurm.ptl_resiliency.fault_tolerance_callback import Callback


class MemoryCheckpoint(Callback):
    """Saves in memory after each `every_n_train_steps` steps, and goes on from there when a fit begins.

    For strategies in which each rank has its whole state, as "ddp". What `fit(ckpt_path=...)` has read before is
    replaced where memory has something. Save to disk as before, less often.
    """

    def __init__(self, every_n_train_steps: int = 1) -> None:
        self._every = every_n_train_steps
        self._saved = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The model is on its device, and what optimizers and loops were is not restored yet."""
        found = checkpoint.load()
        if found is None:
            return
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint, self._saved = found
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Blocks for one copy."""
        step = trainer.global_step
        if step == self._saved or step % self._every:
            return
        self._saved = step
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        checkpoint.save(state, step)
