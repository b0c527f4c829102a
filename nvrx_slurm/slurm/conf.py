"""What a client reads in slurm.conf(5): where the file is, and the socket of Slurm's munged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

MUNGE_SOCKET_ENV = "NVRX_MUNGE_SOCKET"
_USUAL = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
_MAX_BYTES = 4 << 20
_AUTH_INFO = re.compile(rb"^[ \t]*AuthInfo[ \t]*=[ \t]*([^\s#]+)", re.MULTILINE | re.IGNORECASE)


def find(env: Mapping[str, str]) -> Path | None:
    """Path of slurm.conf: SLURM_CONF if that is set, else the first of the usual places; None if there is none."""
    paths = [env["SLURM_CONF"]] if env.get("SLURM_CONF") else _USUAL
    return next((Path(path) for path in paths if Path(path).exists()), None)


def munge_socket(env: Mapping[str, str]) -> str | None:
    """Path of the socket of Slurm's munged; None: where libmunge looks by itself.

    NVRX_MUNGE_SOCKET counts first, then AuthInfo=socket=PATH in slurm.conf, where that can be read.
    """
    if env.get(MUNGE_SOCKET_ENV):
        return env[MUNGE_SOCKET_ENV]
    path = find(env)
    try:
        with open(path or "", "rb") as file:
            found = _AUTH_INFO.search(file.read(_MAX_BYTES))
    except OSError:
        return None
    options = (
        dict(part.partition("=")[::2] for part in found[1].decode(errors="replace").split(","))
        if found
        else {}
    )
    return options.get("socket") or None
