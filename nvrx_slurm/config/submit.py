"""Settings of `nvrx submit`: what sbatch is asked for. What runs in the job are the flags of `nvrx-run`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nvrx_slurm.config import groups as g
from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.settings import Origin, Section, parsed, setting, settings_of
from nvrx_slurm.errors import UsageError

MAX_LINKS = 1000  # Slurm's MaxJobCount is 10,000 by default
_JOB_NAME = re.compile(r"[^\s/%\\\"'`$]{1,200}")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE)


def _job_name(raw: object) -> str:
    name = k.as_text(raw, "must be a name")
    if not _JOB_NAME.fullmatch(name):
        raise ValueError("must be a name without blanks, quotes, / % \\ $ (1 to 200 characters)")
    return name


def _time(raw: object) -> str:
    text = str(raw).strip()
    if isinstance(raw, bool) or not _TIME.fullmatch(text):
        raise ValueError("must be a time limit as sbatch takes it, for example 4:00:00, 1-12 or 30 (minutes)")
    return text


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

    job_name: str = setting(k.Kind("NAME", _job_name), "nvrx", g.JOB, "Name of the job.", env="submit", aliases=("-J",))
    nodes: int | None = setting(
        k.optional(k.integer(1, v.MAX_NODES)), None, g.JOB, env="submit", aliases=("-N",),
        help="All nodes of the job, with the spares. Default: MAX of --nnodes, else 1 and the spares.",
    )  # fmt: skip
    gpus_per_node: int | None = setting(
        k.optional(k.integer(0, 1024)), None, g.JOB, "GPUs that Slurm gives each node.", env="submit"
    )
    cpus_per_task: int | None = setting(
        k.optional(k.integer(1, 65535)), None, g.JOB, env="submit", aliases=("-c",),
        help="CPUs of each node. Default: all, where the job has its nodes for itself.",
    )  # fmt: skip
    exclusive: bool = setting(k.BOOL, True, g.JOB, "No other job runs on the nodes of this one.", env="submit")
    time: str | None = setting(
        k.optional(k.Kind("TIME", _time)), None, g.JOB, env="submit",
        help="Time limit, as sbatch takes it. Default: that of the partition.",
    )  # fmt: skip
    warn_time: int = setting(
        k.integer(0, 65535, "SECONDS"), 120, g.JOB, env="submit",
        help="Slurm sends the warning signal this long before the time limit; longer than the slowest checkpoint. 0: "
        "none.",
    )  # fmt: skip
    partition: str | None = setting(
        k.optional(k.TEXT), None, g.JOB, "Partition of the job.", env="submit", aliases=("-p",)
    )
    account: str | None = setting(
        k.optional(k.TEXT), None, g.JOB, "Account that is charged.", env="submit", aliases=("-A",)
    )
    array: str | None = setting(
        k.optional(k.TEXT), None, g.JOB, "Make it a job array: 0-9, 1-10%1.", env="submit", aliases=("-a",)
    )
    output: str | None = setting(
        k.optional(k.PATH), None, g.JOB, env="submit", aliases=("-o",),
        help="File of the job's own output. Default: %x_%j.out in --log-dir.",
    )  # fmt: skip
    sbatch_args: tuple[str, ...] = setting(
        k.WORDS, (), g.JOB, env="submit", flag="--sbatch-arg", form="repeat",
        help="One more option for sbatch: --sbatch-arg=--qos=high. May be repeated.",
    )  # fmt: skip
    venv: str | None = setting(
        k.optional(k.PATH), None, g.JOB, env="submit",
        help="Python environment that the job activates. Default: the one of this nvrx.",
    )  # fmt: skip
    container_image: str | None = setting(
        k.optional(k.TEXT), None, g.CONTAINER, "Run the training in this image.", env="submit"
    )
    container_runtime: str = setting(
        k.choice("pyxis", "apptainer"), "pyxis", g.CONTAINER, "How it is run: pyxis or apptainer.", env="submit"
    )
    container_mounts: str | None = setting(
        k.optional(k.TEXT), None, g.CONTAINER, env="submit",
        help="SRC:DST[:FLAGS],... Default: the working directory and --log-dir.",
    )  # fmt: skip
    container_workdir: str | None = setting(
        k.optional(k.PATH), None, g.CONTAINER, env="submit",
        help="Directory in the container where the script starts. Default: the working directory.",
    )  # fmt: skip
    chain: int | None = setting(
        k.optional(k.integer(2, MAX_LINKS)), None, g.CHAIN, env="submit",
        help="Submit so many jobs that run one after the other; those that are not needed any more are cancelled.",
    )  # fmt: skip
    wait: bool = setting(
        k.BOOL, False, g.CHAIN, env="submit", form="switch",
        help="Show the job's output until the job, or chain, ends, and exit with its code.",
    )  # fmt: skip

    def check(self, launch: LaunchConfig, stop_s: float) -> None:
        """Raises UsageError for a contradiction. `stop_s`: how long before its limit the job stops its ranks."""
        least, chained = launch.node_range(self.all_nodes(launch)).max, self.chain is not None
        if self.nodes is not None and self.nodes < least:
            raise UsageError(f"--nodes {self.nodes} is less than the {least} nodes of --nnodes and --spares")
        if chained and launch.until_done:
            raise UsageError("--chain and --until-done exclude each other; keep one of them")
        if self.array is not None and (chained or launch.until_done or self.wait):
            raise UsageError("--array excludes --chain, --until-done and --wait; leave it or them out")
        limit_s = _seconds(self.time)
        if limit_s is not None and self.warn_time >= limit_s:
            raise UsageError(f"--warn-time {self.warn_time} is not shorter than --time {self.time}; make it shorter")
        if 0 < self.warn_time <= stop_s:
            raise UsageError(
                f"--warn-time {self.warn_time} is not before the ranks' end, {stop_s:g} s before the limit"
            )
        if (self.container_mounts or self.container_workdir) and not self.container_image:
            raise UsageError("--container-... options need --container-image; give it")

    def all_nodes(self, launch: LaunchConfig) -> int:
        """Nodes to ask Slurm for."""
        if self.nodes is not None:
            return self.nodes
        return launch.node_range(None).max if launch.nnodes is not None else 1 + (launch.spares or 0)


def resolve_submit(flags: Mapping[str, object], environ: Mapping[str, str]) -> SubmitConfig:
    """Flags by field name (None = not given) > NVRX_SUBMIT_... > defaults. Raises UsageError with one sentence."""
    values = {}
    for item in settings_of(SubmitConfig):
        if flags.get(item.name) is not None:
            values[item.name] = parsed(item, flags[item.name], Origin("flag", item.flags[0]))
        elif environ.get(item.env[0]):
            values[item.name] = parsed(item, environ[item.env[0]], Origin("environment", item.env[0]))
    return SubmitConfig(**values)
