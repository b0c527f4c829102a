"""Settings of services that are asked about failures: a part of `FaultToleranceConfig`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import SplitResult, urlsplit

from nvrx_slurm.config import groups as g
from nvrx_slurm.config import kinds as k
from nvrx_slurm.config.ft_logs import LogSettings
from nvrx_slurm.config.kinds import UNIX_SOCKET, Kind, as_text, choice
from nvrx_slurm.config.settings import setting
from nvrx_slurm.config.values import LOG_LEVEL

MANAGED = "localhost"  # the endpoint for which the job runs the service itself
_WEB = ("http", "https")
_ENDPOINT = "must be localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH"


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether nothing that is sent to `host` leaves this machine."""
    address = _ip(host)
    return address.is_loopback if address is not None else host.lower() == MANAGED


def _split(raw: object, problem: str) -> SplitResult:
    """The parts of a URL with a host that can be connected to. Raises ValueError."""
    text = as_text(raw, problem)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", 0
    if not host or port == 0 or " " in text:
        raise ValueError(problem)
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user name and no password: logs and process lists show it")
    address = _ip(host)
    if host in ("*", "0") or (address is not None and address.is_unspecified):
        raise ValueError(f"must name one host: {host} is an address to listen on")
    if parts.query or parts.fragment:
        raise ValueError("must have no ? and no #")
    return parts


def _endpoint(raw: object) -> str:
    text = as_text(raw, _ENDPOINT).strip()
    if text.lower() == MANAGED:
        return MANAGED
    if text.startswith("unix://"):
        return f"unix://{UNIX_SOCKET.parse(text)}"
    parts = _split(text, _ENDPOINT)
    if parts.scheme not in (*_WEB, "grpc") or parts.port is None or parts.path.strip("/"):
        raise ValueError(_ENDPOINT)
    return text.rstrip("/")


def _url(raw: object) -> str:
    problem = "must be http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]"
    text = as_text(raw, problem).strip()
    if _split(text, problem).scheme not in _WEB:
        raise ValueError(problem)
    return text


def _backend(raw: object) -> str:
    if str(raw).strip().lower() == "mcp":
        raise ValueError("must be lib: the analysis of NVRx that spoke MCP is not built")
    return str(choice("lib").parse(raw))


ENDPOINT = Kind("localhost|URL", _endpoint)
URL = Kind("URL", _url)
BACKEND = Kind("lib", _backend)


@dataclass(frozen=True)
class AttributionSettings(LogSettings):
    """Settings of services that are asked about failures; a part of `FaultToleranceConfig`."""

    attribution_endpoint: str | None = setting(
        k.optional(ENDPOINT), None, g.ATTRIBUTION,
        help="Service that analyses the logs of failed cycles: localhost runs one for this job, on the coordinator's "
        "node; http://HOST:PORT, https://HOST:PORT or unix:///PATH is one that runs elsewhere. It never delays a "
        "restart. none: rules only.",
    )  # fmt: skip
    attribution_startup_timeout: float = setting(
        k.POSITIVE_SECONDS, 20.0, g.ATTRIBUTION,
        help="A service of this job that is not up after this time is said on the console; the training goes on.",
    )  # fmt: skip
    attribution_llm_api_key_file: str | None = setting(
        k.optional(k.PATH), None, g.ATTRIBUTION,
        help="File with the key of a language model, readable by its owner only. Default: LLM_API_KEY_FILE.",
    )  # fmt: skip
    attribution_llm_base_url: str | None = setting(
        k.optional(URL), None, g.ATTRIBUTION,
        help="OpenAI-compatible service of a language model, for example https://HOST/v1. Evidence of failed cycles "
        "goes there, redacted. none: no language model.",
    )  # fmt: skip
    attribution_llm_model: str | None = setting(
        k.optional(k.TEXT), None, g.ATTRIBUTION, help="Name of the model at that service."
    )
    attribution_llm_plain_http: bool = setting(
        k.BOOL, False, g.ATTRIBUTION, help="Allow http:// to a language model on another host."
    )
    attribution_analysis_backend: str = setting(
        BACKEND, "lib", g.ATTRIBUTION, help="Accepted for compatibility; there is one analysis."
    )
    attribution_stop_action: str = setting(
        k.choice("log", "no-restart"), "log", g.ATTRIBUTION,
        help="What follows when attribution says that another try would end the same way, or the same rank fails three "
        "times in the same line of the script. log: a line on the console; no-restart: the job ends with "
        "--ft-no-restart-exit-code.",
    )  # fmt: skip
    attribution_log_level: int = setting(
        LOG_LEVEL, logging.INFO, g.ATTRIBUTION,
        help="Level of the service's own log, which is beside the logs of the cycles.",
    )  # fmt: skip
    attribution_export_url: str | None = setting(
        k.optional(URL), None, g.ATTRIBUTION,
        help="Every result of the job's own service is posted there as JSON, once.",
    )  # fmt: skip

    def attribution_contradictions(self) -> Iterator[tuple[bool, str]]:
        """Pairs (is it so?, the sentence about it)."""
        llm = {
            "--ft-attribution-llm-api-key-file": self.attribution_llm_api_key_file,
            "--ft-attribution-llm-base-url": self.attribution_llm_base_url,
            "--ft-attribution-llm-model": self.attribution_llm_model,
        }
        managed = {**llm, "--ft-attribution-export-url": self.attribution_export_url}
        given = next((name for name, value in managed.items() if value), "")
        yield (
            bool(given) and self.attribution_endpoint not in (None, MANAGED),
            f"{given} is for a service that the job runs itself; give --ft-attribution-endpoint {MANAGED}, or"
            " leave it out",
        )
        yield (
            self.attribution_endpoint is not None and self.per_cycle_applog_prefix is None,
            f"--ft-attribution-endpoint {self.attribution_endpoint} analyses the logs of cycles;"
            " give --ft-per-cycle-applog-prefix, too",
        )
        base_url, model = self.attribution_llm_base_url, self.attribution_llm_model
        yield (
            self.attribution_endpoint == MANAGED and any(llm.values()) and not (base_url and model),
            "evidence goes to no language model that was not named; give both --ft-attribution-llm-base-url and"
            " --ft-attribution-llm-model",
        )
        parts = urlsplit(base_url or "")
        yield (
            parts.scheme == "http" and not is_loopback(parts.hostname or "") and not self.attribution_llm_plain_http,
            f"--ft-attribution-llm-base-url {base_url} sends key and evidence unencrypted; give an https:// URL,"
            " or allow it with --ft-attribution-llm-plain-http true",
        )
