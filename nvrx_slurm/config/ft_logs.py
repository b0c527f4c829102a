"""Settings of the merged logs: a part of `FaultToleranceConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.settings import Section, ignored, maybe, setting
from nvrx_slurm.errors import UsageError

MAX_PARTS = 64


@dataclass(frozen=True)
class LogSettings(Section):
    """Logs of one cycle in one file, and the programs that write it."""

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
        k.integer(1, 65535 - MAX_PARTS, "PORT"), 50051, env="both",
        help="Where the log aggregator listens; each part has the next port. One that is taken is replaced.",
    )  # fmt: skip
    log_server_grpc_port: int = setting(
        k.integer(0, 65535, "PORT"), 0,
        help="Also serve NVRx's gRPC log protocol, without a password, for files below the folders of the prefix. 0: "
        "no.",
    )  # fmt: skip
    log_aggregator_count: int = setting(
        k.integer(0, MAX_PARTS), 0, env="both",
        help="Log aggregators, each with files of its own (train_cycle0.part1.log). 0: one per 1,000 nodes.",
    )  # fmt: skip
    log_leaf_max_queue_chunks: int = ignored(
        k.integer(-1), -1, "lines wait in the files of the ranks, not in memory", env="both"
    )
    log_server_log_prefix: str | None = ignored(
        k.optional(k.PATH), None, "the launcher says what the log programs say", env="both"
    )
    log_server_graceful_shutdown_timeout: float = setting(
        k.SECONDS, 60.0, "At the end of the job, longest wait until all lines are in the merged files.", env="both"
    )
    cycle_info_dir: str | None = maybe(
        k.PATH, "Directory for cycle_info.JOB.ATTEMPT.CYCLE (JSON) and the link that NVRX_CURRENT_CYCLE_INFO names."
    )

    def check_logs(self) -> None:
        """Raises UsageError for what needs merged logs without them."""
        given = {"--ft-nvrx-logfile": self.nvrx_logfile, "--ft-log-server-grpc-port": self.log_server_grpc_port}
        for flag, value in given.items():
            if value and self.per_cycle_applog_prefix is None:
                raise UsageError(f"{flag} needs --ft-per-cycle-applog-prefix; give it too, or leave {flag} out")
