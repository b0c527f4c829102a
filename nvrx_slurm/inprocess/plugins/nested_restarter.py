"""Log lines that tell a launcher around the wrapper what it is doing, in the grammar that log readers know.

`[NestedRestarter] name=[InProcess] state=<state>[ stage=<stage>]`, written by one rank:

| when | state | stage |
|---|---|---|
| the function is about to be called for the first time | initialize | |
| a fault is being handled | handling | starting |
| it has been handled, the function is about to be called again | handling | completed |
| the function has returned everywhere | finalized | |
| this rank leaves for good | aborted | |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from nvrx_slurm.inprocess.checks import check_whole
from nvrx_slurm.inprocess.log import setup_logger
from nvrx_slurm.inprocess.plugins.abort import Abort
from nvrx_slurm.inprocess.plugins.completion import Completion
from nvrx_slurm.inprocess.plugins.initialize import Initialize
from nvrx_slurm.inprocess.plugins.terminate import Terminate
from nvrx_slurm.inprocess.state import FrozenState


class NestedRestarterLogger:
    """Where the lines go: the wrapper's own logger, unless `log_for_restarter` is overridden."""

    def __init__(self) -> None:
        setup_logger()
        self._logger = logging.getLogger(__name__)

    def log_for_restarter(self, message: str) -> None:
        """Write one line."""
        self._logger.info("%s", message)


@dataclass
class NestedRestarterCallback:
    """Writes its line on the rank that was `special_rank` at the beginning; returns the state as it is.

    Raises TypeError for a `special_rank` that is no whole number, ValueError for one below 0.
    """

    restarter_state: str
    restarter_stage: str | None = None
    logger: NestedRestarterLogger = field(default_factory=NestedRestarterLogger)
    special_rank: int = 0

    def __post_init__(self) -> None:
        check_whole(f"{type(self).__name__}: special_rank", self.special_rank, 0)

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class."""
        if state.initial_rank == self.special_rank:
            stage = "" if self.restarter_stage is None else f" stage={self.restarter_stage}"
            line = f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}"
            self.logger.log_for_restarter(f"active_rank={state.active_rank} {line}")
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """For `initialize=`; first in a Compose, since a restart is handled when all other initializers have run."""

    def __init__(self, special_rank: int = 0, logger: NestedRestarterLogger | None = None) -> None:
        super().__init__("initialize", logger=logger or NestedRestarterLogger(), special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        """State `initialize` the first time, then `handling completed`."""
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """For `abort=`; last in a Compose, so that it runs first."""

    def __init__(self, special_rank: int = 0, logger: NestedRestarterLogger | None = None) -> None:
        super().__init__("handling", "starting", logger=logger or NestedRestarterLogger(), special_rank=special_rank)


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """For `completion=`."""

    def __init__(self, special_rank: int = 0, logger: NestedRestarterLogger | None = None) -> None:
        super().__init__("finalized", logger=logger or NestedRestarterLogger(), special_rank=special_rank)


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """For `terminate=`."""

    def __init__(self, special_rank: int = 0, logger: NestedRestarterLogger | None = None) -> None:
        super().__init__("aborted", logger=logger or NestedRestarterLogger(), special_rank=special_rank)
