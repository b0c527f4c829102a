"""Settings of services that are asked about failures: a part of `FaultToleranceConfig`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from nvrx_slurm.config import groups as g
from nvrx_slurm.config import kinds as k
from nvrx_slurm.config.ft_logs import LogSettings
from nvrx_slurm.config.kinds import UNIX_SOCKET, Kind, as_text
from nvrx_slurm.config.settings import setting
from nvrx_slurm.config.values import LOG_LEVEL

_SAFE = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])([:/]|$)|https:", re.IGNORECASE)  # no key in the clear
MANAGED = "localhost"  # the endpoint for which the job runs the service itself
_TO_LISTEN_ON = ("*", "0", "0.0.0.0", "::")


def _url(raw: object, form: str, *schemes: str) -> str:
    """A URL of that form, with a host that can be connected to. Raises ValueError."""
    text = as_text(raw, f"must be {form}").strip()
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", 0
    if not host or port == 0 or " " in text or parts.scheme not in schemes:
        raise ValueError(f"must be {form}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("must have no user name and no password, no ? and no #: logs and process lists show it")
    if host in _TO_LISTEN_ON:
        raise ValueError(f"must name one host: {host} is an address to listen on")
    return text


def _endpoint(raw: object) -> str:
    form = "localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH"
    text = as_text(raw, f"must be {form}").strip()
    if text.lower() == MANAGED:
        return MANAGED
    if text.startswith("unix://"):
        return f"unix://{UNIX_SOCKET.parse(text)}"
    url = _url(text, form, "http", "https", "grpc").rstrip("/")
    if not re.fullmatch(r"\w+://[^/]+:\d+", url):
        raise ValueError(f"must be {form}")
    return url


ENDPOINT = Kind("localhost|URL", _endpoint)
URL = Kind("URL", lambda raw: _url(raw, "http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]", "http", "https"))


@dataclass(frozen=True)
class AttributionSettings(LogSettings):
    """Settings of services that are asked about failures; a part of `FaultToleranceConfig`."""

    attribution_endpoint: str | None = setting(
        k.optional(ENDPOINT), None, g.ATTRIBUTION,
        help="Service that analyses the logs of failed cycles: localhost runs one for this job, on the coordinator's "
        "node; http://HOST:PORT, https://HOST:PORT or unix:///PATH runs elsewhere. It never delays a restart.",
    )  # fmt: skip
    attribution_startup_timeout: float = setting(
        k.POSITIVE_SECONDS, 20.0, g.ATTRIBUTION, help="A service of this job that is not up after this time is said."
    )
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
        k.choice("lib"), "lib", g.ATTRIBUTION, help="Accepted for compatibility; there is one analysis."
    )
    attribution_stop_action: str = setting(
        k.choice("log", "no-restart"), "log", g.ATTRIBUTION,
        help="What follows when attribution says that another try would end the same way, or the job fails three times "
        "in a row in the same line of the script: a line on the console, or the end with --ft-no-restart-exit-code.",
    )  # fmt: skip
    attribution_log_level: int = setting(
        LOG_LEVEL, logging.INFO, g.ATTRIBUTION, help="Level of the service's own log, beside the logs of the cycles."
    )
    signatures: str | None = setting(
        k.optional(k.PATH), None, g.ATTRIBUTION,
        help="YAML file with rules of the site about what failures print; they come before the built-in ones.",
    )  # fmt: skip
    attribution_export_url: str | None = setting(
        k.optional(URL), None, g.ATTRIBUTION, help="Every result of the job's own service is posted there as JSON."
    )

    @property
    def attribution_service(self) -> str:
        """The endpoint that can be asked; "" = none: nothing speaks gRPC."""
        endpoint = self.attribution_endpoint or ""
        return "" if endpoint.startswith("grpc:") else endpoint

    @property
    def attribution_note(self) -> str:
        """Said where settings do nothing; "" else."""
        asked = self.attribution_endpoint or self.attribution_llm_base_url or self.attribution_export_url
        if self.attribution_service or not asked:
            return ""
        return "attribution has no effect: --ft-attribution-endpoint must be localhost, or begin with http or unix"

    def attribution_contradictions(self) -> Iterator[tuple[bool, str]]:
        """Pairs (is it so?, the sentence about it)."""
        base_url, model = self.attribution_llm_base_url, self.attribution_llm_model
        has_llm = bool(base_url or model or self.attribution_llm_api_key_file)
        yield (
            (has_llm or self.attribution_export_url is not None) and self.attribution_endpoint not in (None, MANAGED),
            "--ft-attribution-llm-... and --ft-attribution-export-url are for a service that the job runs itself;"
            f" give --ft-attribution-endpoint {MANAGED}, or leave them out",
        )
        yield (
            self.attribution_endpoint is not None and self.per_cycle_applog_prefix is None,
            f"--ft-attribution-endpoint {self.attribution_endpoint} analyses the logs of cycles;"
            " give --ft-per-cycle-applog-prefix, too",
        )
        yield (
            self.attribution_endpoint == MANAGED and has_llm and not (base_url and model),
            "evidence goes to no language model that was not named; give both --ft-attribution-llm-base-url and"
            " --ft-attribution-llm-model",
        )
        yield (
            base_url is not None and not _SAFE.match(base_url) and not self.attribution_llm_plain_http,
            f"--ft-attribution-llm-base-url {base_url} sends key and evidence unencrypted; give an https:// URL,"
            " or allow it with --ft-attribution-llm-plain-http true",
        )
