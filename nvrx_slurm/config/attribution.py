"""Values of the settings of attribution: where services are, and which settings belong together. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from nvrx_slurm.config.kinds import UNIX_SOCKET, Kind, as_text, choice

if TYPE_CHECKING:
    from nvrx_slurm.config.ft import FaultToleranceConfig

MANAGED = "localhost"  # the endpoint for which the job runs the service itself
_WEB = ("http", "https")
_ENDPOINT = "must be localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH"


def is_loopback(host: str) -> bool:
    """Whether nothing that is sent to `host` leaves this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _split(raw: object, problem: str) -> SplitResult:
    """The parts of a URL with a host that can be connected to. Raises ValueError."""
    text = as_text(raw, problem)
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname or ""
    except ValueError as error:
        raise ValueError(f"{problem} ({error})") from None
    if " " in text or not host:
        raise ValueError(problem)
    if port == 0:
        raise ValueError(f"{problem}, with a port from 1 to 65535")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no user name and no password: logs and process lists show it")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = host == "*"
    if everywhere:
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
    if parts.scheme not in (*_WEB, "grpc"):
        raise ValueError(_ENDPOINT)
    if parts.port is None:
        raise ValueError(f"{_ENDPOINT}; the port is missing")
    if parts.path.strip("/"):
        raise ValueError("must end after the port: the service has fixed paths")
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


def contradictions(ft: FaultToleranceConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (is it so?, the sentence about it)."""
    llm = {
        "--ft-attribution-llm-api-key-file": ft.attribution_llm_api_key_file,
        "--ft-attribution-llm-base-url": ft.attribution_llm_base_url,
        "--ft-attribution-llm-model": ft.attribution_llm_model,
    }
    managed = {**llm, "--ft-attribution-export-url": ft.attribution_export_url}
    given = next((name for name, value in managed.items() if value), "")
    yield (
        bool(given) and ft.attribution_endpoint not in (None, MANAGED),
        f"{given} is for a service that the job runs itself; give --ft-attribution-endpoint {MANAGED}, or leave it out",
    )
    yield (
        ft.attribution_endpoint is not None and ft.per_cycle_applog_prefix is None,
        f"--ft-attribution-endpoint {ft.attribution_endpoint} analyses the logs of cycles;"
        " give --ft-per-cycle-applog-prefix, too",
    )
    base_url, model = ft.attribution_llm_base_url, ft.attribution_llm_model
    yield (
        ft.attribution_endpoint == MANAGED and any(llm.values()) and not (base_url and model),
        "evidence goes to no language model that was not named; give both --ft-attribution-llm-base-url and"
        " --ft-attribution-llm-model",
    )
    parts = urlsplit(base_url or "")
    yield (
        parts.scheme == "http" and not is_loopback(parts.hostname or "") and not ft.attribution_llm_plain_http,
        f"--ft-attribution-llm-base-url {base_url} sends the key and the evidence unencrypted; give an https:// URL,"
        " or allow it with --ft-attribution-llm-plain-http true",
    )
