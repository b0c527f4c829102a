"""The file of `nvrx health serve` (docs/reference/node-health-service.md): nvhcd's own keys, and who may ask."""

from __future__ import annotations

from typing import NamedTuple

from nvrx_slurm.config.files import read_document
from nvrx_slurm.config.kinds import (
    ABSOLUTE_PATH,
    BOOL,
    TEXT,
    UNIX_SOCKET,
    Kind,
    choice,
    list_of,
    matching,
    optional,
    real,
)
from nvrx_slurm.config.site import typed


class NvhcdFile(NamedTuple):
    """`healthcheck_path`: the script to run, None = our own checks. `timeout`: seconds for one run.
    `group`: members of it may ask; `everybody`: all users may; else only root. `args`: the words that a call may hand
    to the script."""

    socket_path: str = "/var/run/nvhcd.sock"
    healthcheck_path: str | None = None
    log_level: str = "info"
    timeout: float = 120.0
    group: str | None = None
    everybody: bool = False
    args: tuple[str, ...] = ("--no-slurm",)


# the script runs as root for all users that may connect, and is often shell
_WORD = matching(
    "WORD",
    r"[A-Za-z0-9_.,:=/@%+-]{1,256}",
    "must have words of 1 to 256 letters, digits and _.,:=/@%+-",
)
_KINDS: dict[str, Kind] = {
    "socket_path": UNIX_SOCKET,
    "healthcheck_path": optional(ABSOLUTE_PATH),
    "log_level": choice("debug", "info", "warn", "warning", "error"),
    "timeout": real(above=True, high=3600.0, unit="seconds"),
    "group": optional(TEXT),
    "everybody": BOOL,
    "args": list_of(_WORD, "words"),
}


def load(path: str) -> NvhcdFile:
    """The settings in the YAML file at `path`. Raises UsageError that names file, key and what to do."""
    return NvhcdFile(**typed(read_document(path, "--config"), _KINDS, path))
