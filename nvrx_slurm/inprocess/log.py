"""The wrapper's logger: it writes to stderr of the main process."""

from __future__ import annotations

import logging
import os
import socket

from nvrx_slurm.errors import UsageError

LOGGER_NAME = "nvrx_slurm.inprocess"
LEVEL_ENV = "NVRX_LOG_LEVEL"
_FORMAT = "%(asctime)s [%(levelname)s] %(place)s%(filename)s:%(lineno)d %(message)s"


class _OurHandler(logging.StreamHandler):
    """Adds host and current rank to each record.

    Under nvrx-run neither is added while the rank is the one that the worker began with: the console and the path of
    the log file name both.
    """

    _host = socket.gethostname()
    _rank = "?"
    _told = os.environ.get("RANK") if "NVRX_CYCLE" in os.environ else None

    def emit(self, record: logging.LogRecord) -> None:
        self._rank = os.environ.get("RANK", self._rank)  # the user may have cleared it
        record.place = "" if self._rank == self._told else f"[{self._host}] [rank {self._rank}] "
        super().emit(record)


def setup_logger() -> logging.Logger:
    """The logger of the wrapper and its plug-ins: one handler on stderr, no propagation to the root logger.

    The level is NVRX_LOG_LEVEL (a name of `logging`, default INFO) unless one was set before. Repeated calls add no
    second handler; a handler that the user added before stays the only one. Raises UsageError for an unknown level.
    """
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        level = os.environ.get(LEVEL_ENV, "INFO").upper()
        if not isinstance(logging.getLevelName(level), int):
            raise UsageError(
                f"{LEVEL_ENV}={level} is no level of Python's logging; use DEBUG, INFO, WARNING or ERROR"
            )
        logger.setLevel(level)
    if not logger.handlers:
        handler = _OurHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
    logger.propagate = False
    return logger
