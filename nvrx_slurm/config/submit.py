"""Settings of `nvrx submit`: what sbatch is asked for. What runs in the job are the flags of `nvrx-run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.settings import Origin, Section, maybe, parsed, setting, settings_of, switch
from nvrx_slurm.errors import UsageError

MAX_LINKS = 1000  # Slurm's MaxJobCount is 10,000 by default
_JOB_NAME = k.matching(
    "NAME",
    r"[^/%\\\"'`$]{1,200}",
    "must be a name without quotes, / % \\ $ (1 to 200 characters)",
)
_GPUS = k.matching(
    "[TYPE:]N",
    r"(?:[\w.-]+:)?\d{1,4}",
    "must be a number, or a type and a number such as a100:4",
)
_TIME = k.matching(
    "TIME",
    r"(?i:(\d+-)?\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE)",
    "must be a time limit as sbatch takes it, for example 4:00:00, 1-12 or 30 (minutes)",
)


def _seconds(limit: str | None) -> float | None:
    """Seconds of a time limit as sbatch reads it; None for no limit."""
    days, dash, rest = (limit or "x").rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts):
        return None
    numbers = [int(part) for part in parts] + [0] * (3 - len(parts))
    if not dash and len(parts) < 3:  # MINUTES, MINUTES:SECONDS
        numbers = [0, *numbers[:2]]
    return float(int(days or 0) * 86400 + numbers[0] * 3600 + numbers[1] * 60 + numbers[2])


@dataclass(frozen=True)
class SubmitConfig(Section):
    """What `nvrx submit` asks Slurm for. None, "" and () leave it to Slurm."""

    section: ClassVar[str] = "submit"

    job_name: str = setting(
        _JOB_NAME, "nvrx", "Name of the job.", begins="The job", aliases=("-J",)
    )
    nodes: int | None = maybe(
        k.integer(1, v.MAX_NODES), aliases=("-N",),
        help="All nodes of the job, with the spares. Default: MAX of --nnodes, else 1 and the spares.",
    )  # fmt: skip
    gpus_per_node: str | None = maybe(_GPUS, "GPUs that Slurm gives each node: 4, a100:4.")
    cpus_per_task: int | None = maybe(
        k.integer(1, 65535),
        "CPUs of each node. Default: all, where the job has its nodes for itself.",
        aliases=("-c",),
    )
    exclusive: bool = setting(k.BOOL, True, "No other job runs on the nodes of this one.")
    time: str | None = maybe(
        _TIME, "Time limit, as sbatch takes it. Default: that of the partition."
    )
    warn_time: int = setting(
        k.integer(0, 65535, "SECONDS"), 120,
        help="Slurm sends the warning signal this long before the time limit; longer than the slowest checkpoint. 0: "
        "none.",
    )  # fmt: skip
    partition: str | None = maybe(k.TEXT, "Partition of the job.", aliases=("-p",))
    account: str | None = maybe(k.TEXT, "Account that is charged.", aliases=("-A",))
    array: str | None = maybe(k.TEXT, "Make it a job array: 0-9, 1-10%1.", aliases=("-a",))
    output: str | None = maybe(
        k.PATH, "File of the job's own output. Default: %x_%j.out in --log-dir.", aliases=("-o",)
    )
    sbatch_args: tuple[str, ...] = setting(
        k.WORDS, (), flag="--sbatch-arg", form="repeat",
        help="One more option for sbatch: --sbatch-arg=--qos=high. May be repeated.",
    )  # fmt: skip
    avoid_strikes: bool = switch(
        "Leave out nodes with three or more strikes in --log-dir within 28 days."
    )
    venv: str | None = maybe(
        k.PATH, "Python environment that the job activates. Default: the one of this nvrx."
    )

    container_image: str | None = maybe(
        k.TEXT, "Run the training in this image.", begins="Container"
    )
    container_runtime: str = setting(
        k.choice("pyxis", "apptainer"), "pyxis", "Runs the image: pyxis or apptainer."
    )
    container_mounts: str | None = maybe(
        k.TEXT, "SRC:DST[:FLAGS],... Default: the working directory and --log-dir."
    )
    container_workdir: str | None = maybe(
        k.PATH,
        "Directory in the container where the script starts. Default: the working directory.",
    )

    chain: int | None = maybe(
        k.integer(2, MAX_LINKS), begins="Chains and waiting",
        help="Submit so many jobs that run one after the other; those that are not needed any more are cancelled.",
    )  # fmt: skip
    wait: bool = switch(
        "Show the job's output until the job, or chain, ends, and exit with its code."
    )

    def check(self, launch: LaunchConfig, stop_s: float) -> None:
        """Raises UsageError for a contradiction. `stop_s`: how long before its limit the job stops its ranks."""
        least = launch.node_range(self.all_nodes(launch)).max
        chained = self.chain is not None
        if self.nodes is not None and self.nodes < least:
            raise UsageError(
                f"--nodes {self.nodes} is less than the {least} nodes of --nnodes and --spares"
            )
        if launch.standalone:
            raise UsageError("--standalone has no meaning for a submitted job; use --nodes 1")
        if chained and launch.until_done:
            raise UsageError("--chain and --until-done exclude each other; keep one of them")
        if self.array is not None and (chained or launch.until_done or self.wait):
            raise UsageError(
                "--array excludes --chain, --until-done and --wait; leave it or them out"
            )
        limit_s = _seconds(self.time)
        if limit_s is not None and self.warn_time >= limit_s:
            raise UsageError(
                f"--warn-time {self.warn_time} is not shorter than --time {self.time}; make it shorter"
            )
        if 0 < self.warn_time <= stop_s:
            raise UsageError(
                f"--warn-time {self.warn_time} is too short: ranks end {stop_s:g} s before the limit"
            )
        if (self.container_mounts or self.container_workdir) and not self.container_image:
            raise UsageError("--container-... options need --container-image; give it")

    def all_nodes(self, launch: LaunchConfig) -> int:
        """Nodes to ask Slurm for."""
        if self.nodes is not None:
            return self.nodes
        return (
            launch.node_range(None).max if launch.nnodes is not None else 1 + (launch.spares or 0)
        )


def resolve_submit(flags: Mapping[str, object], environ: Mapping[str, str]) -> SubmitConfig:
    """Flags by field name (None = not given) > NVRX_SUBMIT_... > defaults. Raises UsageError with one sentence."""
    values = {}
    for item in settings_of(SubmitConfig):
        if flags.get(item.name) is not None:
            values[item.name] = parsed(item, flags[item.name], Origin("flag", item.flags[0]))
        elif environ.get(item.env[0]):
            values[item.name] = parsed(
                item, environ[item.env[0]], Origin("environment", item.env[0])
            )
    return SubmitConfig(**values)
