"""Settings of the merged logs: a part of `FaultToleranceConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nvrx_slurm.config import groups as g
from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.settings import Section, setting


@dataclass(frozen=True)
class LogSettings(Section):
    """Logs of one cycle in one file, and the programs that write it."""

    per_cycle_applog_prefix: str | None = setting(
        k.optional(v.LOG_PATH), None, g.LOG_SERVER, env="both",
        help="One file per cycle with the lines of all ranks: /x/train.log gives /x/train_cycle0.log. Placeholders: "
        "%j job, %A array, %a task, %r requeues.",
    )  # fmt: skip
    nvrx_logfile: str | None = setting(
        k.optional(v.LOG_PATH), None, g.LOG_SERVER, env="both",
        help="One file with what the launchers of all nodes say; needs the prefix of the logs per cycle.",
    )  # fmt: skip
    enable_log_server: bool | None = setting(
        k.optional(k.BOOL), None, g.LOG_SERVER, env="both",
        help="Accepted for compatibility: with a prefix, lines always go through the job's own log aggregator.",
    )  # fmt: skip
    log_server_port: int = setting(
        k.integer(1, 65535, "PORT"), 50051, g.LOG_SERVER, env="both",
        help="Where the log aggregator listens. A port that is taken is replaced.",
    )  # fmt: skip
    log_server_grpc_port: int = setting(
        k.integer(0, 65535, "PORT"), 0, g.LOG_SERVER,
        help="Also serve NVRx's gRPC log protocol at this port, for foreign clients; it has no password. It writes "
        "below the folders of the prefix and of the launchers' file only. 0: no.",
    )  # fmt: skip
    log_aggregator_count: int = setting(
        k.integer(0, 64), 0, g.LOG_SERVER, env="both", no_effect="one log aggregator serves all nodes",
        help="Accepted for compatibility.",
    )  # fmt: skip
    log_leaf_max_queue_chunks: int = setting(
        k.integer(-1), -1, g.LOG_SERVER, env="both", no_effect="lines wait in the files of the ranks, not in memory",
        help="Accepted for compatibility.",
    )  # fmt: skip
    log_server_log_prefix: str | None = setting(
        k.optional(k.PATH), None, g.LOG_SERVER, env="both", no_effect="the launcher says what the log programs say",
        help="Accepted for compatibility.",
    )  # fmt: skip
    log_server_graceful_shutdown_timeout: float = setting(
        k.SECONDS, 60.0, g.LOG_SERVER, env="both",
        help="At the end of the job, longest wait until all lines are in the merged files.",
    )  # fmt: skip
    cycle_info_dir: str | None = setting(
        k.optional(k.PATH), None, g.LOG_SERVER,
        help="Directory for cycle_info.JOB.ATTEMPT.CYCLE (JSON: nodes, times, log file) and the link "
        "cycle_info.JOB.current, which workers find in NVRX_CURRENT_CYCLE_INFO.",
    )  # fmt: skip

    def log_contradictions(self) -> Iterator[tuple[bool, str]]:
        """Pairs (is it so?, the sentence about it)."""
        prefix = self.per_cycle_applog_prefix
        yield (
            self.nvrx_logfile is not None and prefix is None,
            "--ft-nvrx-logfile needs --ft-per-cycle-applog-prefix; give it too, or leave --ft-nvrx-logfile out",
        )
        yield (
            self.enable_log_server is True and prefix is None,
            "--ft-enable-log-server true needs --ft-per-cycle-applog-prefix: where should the lines go?",
        )
        yield (
            self.log_server_grpc_port > 0 and prefix is None,
            "--ft-log-server-grpc-port needs --ft-per-cycle-applog-prefix; give it too, or leave the port out",
        )
        yield (
            self.log_server_grpc_port == self.log_server_port,
            f"--ft-log-server-grpc-port {self.log_server_grpc_port} is --ft-log-server-port; give another",
        )
