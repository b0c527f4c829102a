"""Settings of merged logs and of services that are asked about failures: a part of `FaultToleranceConfig`."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.kinds import UNIX_SOCKET, Kind
from nvrx_slurm.config.settings import Section, ignored, maybe, setting
from nvrx_slurm.errors import UsageError

# no key in the clear
_SAFE = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])([:/]|$)|https:", re.IGNORECASE)
MANAGED = "localhost"  # the endpoint for which the job runs the service itself
# no user name and no password: logs and process lists show it
_HOST = r"(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]*]+)"
_PORT = r":[1-9]\d{0,4}"


def _url(pattern: str, form: str) -> Kind:
    """A URL of that form."""
    url = k.matching("URL", f"(?i:{pattern})", f"must be {form}, without a user name, ? and #")
    return url._replace(parse=lambda raw: url.parse(raw).rstrip("/"))


_SERVICE = _url(
    f"(https?|grpc)://{_HOST}{_PORT}/?",
    "localhost, http://HOST:PORT, https://HOST:PORT or unix:///PATH",
)


def _endpoint(raw: object) -> str:
    text = str(raw).strip()
    if text.lower() == MANAGED:
        return MANAGED
    return (
        f"unix://{UNIX_SOCKET.parse(text)}"
        if text.startswith("unix://")
        else str(_SERVICE.parse(raw))
    )


ENDPOINT = Kind("localhost|URL", _endpoint)
URL = _url(
    f"https?://{_HOST}({_PORT})?(/[^?#\\s]*)?",
    "http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]",
)


_PROM = k.matching(
    "PATH",
    r"/.*\.prom",
    "must be an absolute path that ends in .prom: node_exporter reads no other file",
)


@dataclass
class LogSettings(Section):
    """Logs of one cycle in one file, the programs that write it, and the services that read it."""

    per_cycle_applog_prefix: str | None = maybe(
        v.LOG_PATH, begins="Log aggregation", env="both",
        help="One file per cycle with the lines of all ranks: /x/train.log gives /x/train_cycle0.log. Placeholders: %j"
        " job, %A array, %a task, %r requeues.",
    )  # fmt: skip
    nvrx_logfile: str | None = maybe(
        v.LOG_PATH, env="both",
        help="One file with what the launchers of all nodes say; needs the prefix of the logs per cycle.",
    )  # fmt: skip
    enable_log_server: bool | None = maybe(
        k.BOOL, env="both",
        help="Accepted for compatibility: with a prefix, lines always go through the job's own log aggregator.",
    )  # fmt: skip
    log_server_port: int = setting(
        k.integer(1, 65535, "PORT"), 50051, env="both",
        help="Where the log aggregator listens. A port that is taken is replaced.",
    )  # fmt: skip
    log_server_grpc_port: int = setting(
        k.integer(0, 65535, "PORT"), 0,
        help="Also serve NVRx's gRPC log protocol, without a password, for files below the folders of the prefix. 0: "
        "no.",
    )  # fmt: skip
    log_aggregator_count: int = ignored(
        k.integer(0, 64), 0, "one log aggregator serves all nodes", env="both"
    )
    log_leaf_max_queue_chunks: int = ignored(
        k.integer(-1), -1, "lines wait in the files of the ranks, not in memory", env="both"
    )
    log_server_log_prefix: str | None = ignored(
        k.optional(k.PATH), None, "the launcher says what the log programs say", env="both"
    )
    log_server_graceful_shutdown_timeout: float = setting(
        k.SECONDS,
        60.0,
        "At the end of the job, longest wait until all lines are in the merged files.",
        env="both",
    )
    cycle_info_dir: str | None = maybe(
        k.PATH,
        "Directory for cycle_info.JOB.ATTEMPT.CYCLE (JSON) and the link that NVRX_CURRENT_CYCLE_INFO names.",
    )

    attribution_endpoint: str | None = maybe(
        ENDPOINT, begins="Attribution",
        help="Service that analyses the logs of failed cycles: localhost runs one for this job, on the coordinator's "
        "node; http://HOST:PORT, https://HOST:PORT or unix:///PATH runs elsewhere.",
    )  # fmt: skip
    attribution_startup_timeout: float = setting(
        k.POSITIVE_SECONDS,
        20.0,
        "The console says so if the service of this job is not up after this time.",
    )
    attribution_llm_api_key_file: str | None = maybe(
        k.PATH,
        "File with the key of a language model, readable by its owner only. Default: LLM_API_KEY_FILE.",
    )
    attribution_llm_base_url: str | None = maybe(
        URL,
        help="OpenAI-compatible service, https://HOST/v1, that gets evidence of failed cycles, redacted. none: no "
        "model.",
    )  # fmt: skip
    attribution_llm_model: str | None = maybe(k.TEXT, "Name of the model at that service.")
    attribution_llm_plain_http: bool = setting(
        k.BOOL, False, "Allow http:// to a language model on another host."
    )
    attribution_analysis_backend: str = setting(
        k.choice("lib"), "lib", "Accepted for compatibility; there is one analysis."
    )
    attribution_stop_action: str = setting(
        k.choice("log", "no-restart"), "log",
        help="What follows when another try would end the same way, or the same line of the script fails three times "
        "in a row: a line on the console, or the end with --ft-no-restart-exit-code.",
    )  # fmt: skip
    attribution_log_level: int = setting(
        v.LOG_LEVEL, logging.INFO, "Level of the service's own log, beside the logs of the cycles."
    )
    signatures: str | None = maybe(
        k.PATH,
        "YAML file with rules of the site about what failures print; they come before the built-in ones.",
    )
    attribution_export_url: str | None = maybe(
        URL, "Every result of the job's own service is posted there as JSON."
    )

    notify: str | None = maybe(
        URL, begins="Notification",
        help="Post JSON to this URL when the job restarts, needs a person (no spare is left) or gives up. Its member "
        "text suits Slack.",
    )  # fmt: skip
    slurm_comment: bool = setting(
        k.BOOL,
        False,
        "Keep the Comment of the Slurm job at its cycle, restarts and end: squeue -O Comment.",
    )

    metrics_file: str | None = maybe(
        _PROM,
        help="Keep the metrics of the job in this file for node_exporter's textfile collector, on the coordinator's "
        "node. {job} is the job's id.",
    )  # fmt: skip

    @property
    def attribution_service(self) -> str:
        """The endpoint that can be asked; "" = none: nothing speaks gRPC."""
        endpoint = self.attribution_endpoint or ""
        return "" if endpoint.startswith("grpc:") else endpoint

    @property
    def attribution_note(self) -> str:
        """Said where settings do nothing; "" else."""
        asked = (
            self.attribution_endpoint
            or self.attribution_llm_base_url
            or self.attribution_export_url
        )
        if self.attribution_service or not asked:
            return ""
        return "attribution has no effect: --ft-attribution-endpoint must be localhost, or begin with http or unix"

    def check_attribution(self) -> None:
        """Raises UsageError where settings contradict each other."""
        endpoint = self.attribution_endpoint
        base_url = self.attribution_llm_base_url
        model = self.attribution_llm_model
        has_llm = bool(base_url or model or self.attribution_llm_api_key_file)
        if (has_llm or self.attribution_export_url is not None) and endpoint not in (None, MANAGED):
            raise UsageError(
                "--ft-attribution-llm-... and --ft-attribution-export-url are for a service that the job runs itself;"
                f" give --ft-attribution-endpoint {MANAGED}, or leave them out"
            )
        if endpoint is not None and self.per_cycle_applog_prefix is None:
            raise UsageError(
                "--ft-attribution-endpoint needs the logs of cycles; give --ft-per-cycle-applog-prefix"
            )
        if endpoint == MANAGED and has_llm and not (base_url and model):
            raise UsageError(
                "give both --ft-attribution-llm-base-url and --ft-attribution-llm-model, or neither"
            )
        if (
            base_url is not None
            and not _SAFE.match(base_url)
            and not self.attribution_llm_plain_http
        ):
            raise UsageError(
                f"--ft-attribution-llm-base-url {base_url} sends key and evidence unencrypted; give an https:// URL,"
                " or allow it with --ft-attribution-llm-plain-http true"
            )

    def check_logs(self) -> None:
        """Raises UsageError for what needs merged logs without them."""
        given = {
            "--ft-nvrx-logfile": self.nvrx_logfile,
            "--ft-log-server-grpc-port": self.log_server_grpc_port,
        }
        for flag, value in given.items():
            if value and self.per_cycle_applog_prefix is None:
                raise UsageError(
                    f"{flag} needs --ft-per-cycle-applog-prefix; give it too, or leave {flag} out"
                )
