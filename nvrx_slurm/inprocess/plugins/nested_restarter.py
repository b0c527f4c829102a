"""Log lines for a launcher around the wrapper, in NVRx's grammar. One rank writes them.

`[NestedRestarter] name=[InProcess] state=<state>[ stage=<stage>]`:

| when | state | stage |
|---|---|---|
| before the first call of the function | initialize | |
| at the start of a restart | handling | starting |
| at its end, before the next call | handling | completed |
| after the function has returned on all ranks | finalized | |
| when this rank leaves for good | aborted | |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from nvrx_slurm.inprocess.checks import check_whole
from nvrx_slurm.inprocess.log import setup_logger
from nvrx_slurm.inprocess.plugins.abort import Abort
from nvrx_slurm.inprocess.plugins.steps import Completion, Initialize, Terminate
from nvrx_slurm.inprocess.state import FrozenState


class NestedRestarterLogger:
    """Writes the lines to the wrapper's own logger; override `log_for_restarter` for another place."""

    def __init__(self) -> None:
        setup_logger()
        self._logger = logging.getLogger(__name__)

    def log_for_restarter(self, message: str) -> None:
        """Write one line."""
        self._logger.info("%s", message)


@dataclass
class NestedRestarterCallback:
    """Write one line on the rank whose initial rank is `special_rank`; returns the state.

    Raises TypeError for a `special_rank` that is not an int, ValueError for one below 0.
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


class _Stage(NestedRestarterCallback):
    """A callback with a state of its own."""

    STATE: str
    STAGE: str | None = None

    def __init__(self, special_rank: int = 0, logger: NestedRestarterLogger | None = None) -> None:
        super().__init__(self.STATE, self.STAGE, logger or NestedRestarterLogger(), special_rank)


class NestedRestarterHandlingCompleted(_Stage, Initialize):
    """For `initialize=`: `initialize` the first time, then `handling completed`.

    List it first in a Compose: a restart is complete when all other initializers have run.
    """

    STATE = "initialize"

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class."""
        super().__call__(state)
        self.restarter_state = "handling"
        self.restarter_stage = "completed"
        return state


class NestedRestarterHandlingStarting(_Stage, Abort):
    """For `abort=`; list it last in a Compose, so that it runs first."""

    STATE = "handling"
    STAGE = "starting"


class NestedRestarterFinalized(_Stage, Completion):
    """For `completion=`."""

    STATE = "finalized"


class NestedRestarterAborted(_Stage, Terminate):
    """For `terminate=`."""

    STATE = "aborted"
