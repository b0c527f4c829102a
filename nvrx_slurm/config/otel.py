"""The OTEL_ variables of OpenTelemetry that say where metrics go (its specification: "OTLP Exporter Configuration")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

from nvrx_slurm.config.ft_logs import URL
from nvrx_slurm.declared import Record

_PREFIX = "OTEL_EXPORTER_OTLP_"
_METRICS = "OTEL_EXPORTER_OTLP_METRICS_"
_LONGEST_MS = 86_400_000
# what HTTP takes in a header
_KEY, _VALUE = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII), re.compile(r"[ -~]*")


class OtlpTarget(Record):
    """A collector. `problem`: why it gets nothing, in a sentence; "" = it does. Times in seconds."""

    url: str
    headers: tuple[tuple[str, str], ...] = ()
    resource: tuple[tuple[str, str], ...] = ()
    every_s: float = 60.0
    timeout_s: float = 10.0
    problem: str = ""


def otlp_target(env: Mapping[str, str]) -> OtlpTarget | None:
    """Where metrics are to be pushed; None: nowhere. A bad value ends no job: the variables are for all programs."""

    def of(name: str) -> str:
        return env.get(_METRICS + name, "").strip() or env.get(_PREFIX + name, "").strip()

    base = env.get(f"{_PREFIX}ENDPOINT", "").strip()
    url = env.get(f"{_METRICS}ENDPOINT", "").strip() or (base and f"{base.rstrip('/')}/v1/metrics")
    off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if (
        not url
        or off
        or env.get("OTEL_METRICS_EXPORTER", "otlp").strip() in ("none", "prometheus", "console")
    ):
        return None
    try:
        if of("PROTOCOL") == "grpc":
            raise ValueError(
                "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported; give http/json and port 4318"
            )
        return OtlpTarget(
            URL.parse(url),
            headers=_pairs("OTEL_EXPORTER_OTLP_HEADERS", of("HEADERS")),
            resource=(
                ("service.name", env.get("OTEL_SERVICE_NAME", "").strip() or "nvrx_slurm"),
                *_pairs(
                    "OTEL_RESOURCE_ATTRIBUTES", env.get("OTEL_RESOURCE_ATTRIBUTES", "").strip()
                ),
            ),
            every_s=_seconds(
                "OTEL_METRIC_EXPORT_INTERVAL", env.get("OTEL_METRIC_EXPORT_INTERVAL", ""), 60.0
            ),
            timeout_s=_seconds("OTEL_EXPORTER_OTLP_TIMEOUT", of("TIMEOUT"), 10.0),
        )
    except ValueError as error:
        return OtlpTarget("", problem=f"no metrics are pushed: {error}")


def _pairs(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """The pairs of a list as in W3C Baggage: key=value, separated by commas, values percent-encoded."""
    found = []
    for pair in filter(None, text.split(",")):
        key, separator, value = pair.partition("=")
        if not (separator and _KEY.fullmatch(key.strip()) and _VALUE.fullmatch(unquote(value))):
            # not the value: it may be a secret
            raise ValueError(f"{name} must be key=value,key=value in ASCII")
        found.append((key.strip(), unquote(value.strip())))
    return tuple(found)


def _seconds(name: str, text: str, default: float) -> float:
    if not (text := text.strip()):
        return default
    if not text.isdecimal() or not 0 < int(text[:12]) <= _LONGEST_MS:
        raise ValueError(f"{name} must be a number of milliseconds from 1 to {_LONGEST_MS}")
    return int(text) / 1000
