"""The file of `nvrx health serve` (docs/nvhcd.md): nvhcd's own keys and `group`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nvrx_slurm.config.files import read_document
from nvrx_slurm.config.kinds import (
    ABSOLUTE_PATH,
    TEXT,
    UNIX_SOCKET,
    Kind,
    choice,
    did_you_mean,
    optional,
    real,
)
from nvrx_slurm.errors import UsageError


class Settings(NamedTuple):
    """`healthcheck_path`: the script to run, None = our own checks. `timeout`: seconds for one run.
    `group`: the socket's group, whose members may ask; None = all users may."""

    socket_path: str = "/var/run/nvhcd.sock"
    healthcheck_path: str | None = None
    log_level: str = "info"
    timeout: float = 120.0
    group: str | None = None


_KINDS: dict[str, Kind] = {
    "socket_path": UNIX_SOCKET,
    "healthcheck_path": optional(ABSOLUTE_PATH),
    "log_level": choice("debug", "info", "warn", "warning", "error"),
    "timeout": real(above=True, high=3600.0, unit="seconds"),
    "group": optional(TEXT),
}


def load(path: str) -> Settings:
    """The settings in the YAML file at `path`. Raises UsageError that names file, key and what to do."""
    document = read_document(path, "--config")
    if document is None:
        return Settings()
    if not isinstance(document, Mapping):
        raise UsageError(f"{path} must be a mapping of names to values, for example socket_path: /var/run/nvhcd.sock")
    values = {}
    for key, raw in document.items():
        name = str(key)
        if name not in _KINDS:
            hint = did_you_mean(name, _KINDS) or f"; known: {', '.join(_KINDS)}"
            raise UsageError(f"{path}: {name[:80]!r} is not a key{hint}")
        try:
            values[name] = _KINDS[name].parse(raw)
        except ValueError as error:
            raise UsageError(f"{path}: {name} {error}, not {repr(raw)[:80]}") from None
    return Settings(**values)
