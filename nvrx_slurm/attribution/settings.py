"""What the attribution process is told once, and what it is told about each cycle. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PORT = 50050  # of the service that a job runs itself (seed 000)
SOCKET_NAME = "attribution.sock"
MANAGED = "localhost"
LAST_WORDS_S = 3.0  # how long the process may take to end once its job has ended


@dataclass(frozen=True)
class Settings:
    """The settings of one job. Empty text = not given."""

    endpoint: str  # "localhost": this process is the service; else where it is
    root: str = ""  # below it are the logs that may be analysed
    tree: str = ""  # our own log tree of this run
    own_log: str = ""
    log_level: int = 20
    user: str = ""
    job_id: str = ""
    cluster: str = ""
    llm_base_url: str = ""
    llm_model: str = ""
    llm_key_file: str = ""
    export_url: str = ""
    socket: str = ""  # Unix socket of the managed service
    port: int = PORT

    @property
    def managed(self) -> bool:
        """Whether this process is the service."""
        return self.endpoint == MANAGED

    @property
    def metadata(self) -> dict[str, str]:
        """What every submission says about the job; what is not known is left out."""
        return {name: value for name, value in (("user", self.user), ("job_id", self.job_id)) if value}


@dataclass(frozen=True)
class CycleNews:
    """A cycle runs, or is over."""

    cycle: int
    log: str  # the merged log of the cycle
    over: bool = False
    lasted_s: float = 0.0
    fault: dict[str, Any] = field(default_factory=dict)  # the first cause, as the coordinator knows it; {} = none
