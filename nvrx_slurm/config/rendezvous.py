"""Values of the rendezvous: --rdzv-endpoint and --rdzv-conf, in torchrun's grammar. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from nvrx_slurm.config.kinds import BOOL, POSITIVE_SECONDS, SECONDS, Kind, as_text, did_you_mean, optional
from nvrx_slurm.config.values import pairs


def split_endpoint(text: str, default_port: int = 29400) -> tuple[str, int]:
    """(host, port) of HOST[:PORT] or [IPV6]:PORT; port 0..65535. Raises ValueError("must be ...")."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        port = rest[1:]
        good = bool(closed) and (not rest or rest.startswith(":"))
    else:
        good = host.count(":") <= 1
        host, _, port = host.partition(":")
    number = int(port) if port.isdecimal() and len(port) < 6 else default_port if not port else -1
    if not good or not host or not 0 <= number <= 65535 or any(c.isspace() or c in "/@" for c in host):
        raise ValueError("must be HOST:PORT (an IPv6 address in brackets), for example node1:29400")
    return host, number


def split_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each in HOST[:PORT],... Raises ValueError("must be ...")."""
    return tuple(map(split_endpoint, text.split(",")))


def _endpoints(raw: object) -> str:
    if raw == "":
        return ""
    text = as_text(raw, "must be HOST:PORT").strip()
    split_endpoints(text)
    return text


ENDPOINTS = Kind("HOST[:PORT],...", _endpoints)


@dataclass(frozen=True)
class RendezvousConfig:
    """`--rdzv-conf`, times in seconds. `NO_EFFECT` is taken for compatibility and changes nothing here."""

    is_host: bool | None = None  # this node starts the coordinator; None = decided by infra rank or endpoint
    join_timeout: float = 300.0  # > 0: how long too few nodes are waited for; default: `timeout` where that is given
    last_call_timeout: float = 1.0  # >= 0: how long a complete job waits for spares before its first plan
    read_timeout: float = 60.0
    close_timeout: float = 30.0
    timeout: float = 900.0
    store_connect_wait_seconds: float = 120.0
    use_libuv: bool = True

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)


_KINDS: dict[str, Kind] = {
    "is_host": optional(BOOL),
    "join_timeout": POSITIVE_SECONDS,
    "last_call_timeout": SECONDS,
    "read_timeout": POSITIVE_SECONDS,
    "close_timeout": SECONDS,
    "timeout": POSITIVE_SECONDS,
    "store_connect_wait_seconds": SECONDS,
    "use_libuv": BOOL,
}
NO_EFFECT = ("read_timeout", "close_timeout", "store_connect_wait_seconds", "use_libuv")
_UNSUPPORTED = ("replacement_group_size", "segment", "segment_check_interval")


def _rdzv_conf(raw: object) -> RendezvousConfig:
    if isinstance(raw, RendezvousConfig):
        return raw
    values: dict[str, Any] = {}
    known = f" (known: {', '.join(_KINDS)})"
    text = raw.strip("'\"") if isinstance(raw, str) else raw  # quotes that a launcher's script passes on
    for name, value in pairs(
        text, "=", "must be KEY=VALUE,... with each key once, for example join_timeout=600"
    ).items():
        if name in _UNSUPPORTED:
            raise ValueError(f"{name} is not supported; leave it out")
        if name not in _KINDS:
            raise ValueError(f"{name} is not a key of --rdzv-conf{did_you_mean(name, _KINDS) or known}")
        try:
            values[name] = _KINDS[name].parse(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if "timeout" in values:  # with torchrun, users raise it for nodes that come late
        values.setdefault("join_timeout", values["timeout"])
    return RendezvousConfig(**values)


RDZV_CONF = Kind("KEY=VALUE,...", _rdzv_conf, str)
