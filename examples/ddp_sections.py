"""The training of ddp.py, with sections instead of heartbeats: each part has a timeout of its own.

A step that takes half a second may hang for a few seconds only, while loading a checkpoint may take minutes: one
heartbeat timeout would have to cover both. Whatever is in no section has `--ft-rank-out-of-section-timeout`.

    nvrx-run --nproc-per-node 2 --max-restarts 3 \
        --ft-rank-section-timeouts setup:600,step:10,checkpointing:120 --ft-rank-out-of-section-timeout 30 \
        examples/ddp_sections.py --checkpoint-dir ckpt --learn-timeouts

With `--learn-timeouts` these are the timeouts of the beginning only: at each checkpoint all ranks replace them by five
times (`--ft-safety-factor`) the longest time that any of them needed (but at least `--ft-workload-check-interval`), and
keep them in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ddp


class Sections(ddp.Heartbeats):
    """The same, told by sections. What the launcher has no timeout for is ignored there, not here."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        if self.client is None:
            yield
            return
        self.client.start_section(name)
        yield  # not in a finally: a section that ends with an exception is not over, and this process is about to end
        self.client.end_section(name)

    def after_step(self) -> None:
        pass

    def before_checkpoint(self) -> None:
        # Only what was seen is learned: not the setup of a run that had nothing to load, nor the first checkpoint. And
        # not the time in no section: milliseconds between two steps say nothing about the end of the training.
        seen = {"step": True, "setup": self.resumed, "checkpointing": self.checkpoints > 0}
        self.checkpoints += 1
        if self.client and self.learns:
            names = [name for name in self.client.section_timeouts.section if seen.get(name)]
            self.client.calculate_and_set_section_timeouts(names, calc_out_of_section=False, skip_if_not_ready=True)


if __name__ == "__main__":
    ddp.main(Sections)
