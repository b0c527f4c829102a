"""The text of an sbatch script for a job of nvrx-run. Pure: settings in, text out."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.submit import SubmitConfig


@dataclass(frozen=True)
class Surroundings:
    """What the rendered script takes from the place of `nvrx submit`. Paths are absolute, or "" for none."""

    venv: str
    directory: str  # the working directory
    log_dir: str
    links: str = ""  # the file with the jobs of the chain
    warning_signal: str = "USR1"  # without SIG; "" = none
    requeue: str = "--requeue"  # or "--requeue=expedite", where the cluster has it


def render(
    submit: SubmitConfig,
    launch: LaunchConfig,
    flags: Sequence[str],
    words: Sequence[str],
    place: Surroundings,
) -> str:
    """An sbatch script. `flags`: of nvrx-run, each in one word; `words`: the training script and its arguments,
    () = those that the sbatch script is given."""
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(submit, launch, place))]
    lines += ["", "set -euo pipefail"]
    if not words:
        lines += [
            '(($#)) || { echo "usage: sbatch [OPTIONS] THIS_FILE SCRIPT [ARGS...]" >&2; exit 2; }'
        ]
    if place.venv:
        lines.append(f"source {shlex.quote(place.venv + '/bin/activate')}")
    lines.append("export PYTHONUNBUFFERED=1")
    if place.links:
        lines.append(f"export NVRX_CHAIN_LINKS={shlex.quote(place.links)}")
    command = ["exec nvrx-run", *map(shlex.quote, (*flags, *_container(submit, place)))]
    command.append(shlex.join(words) if words else '"$@"')
    return "\n".join([*lines, " \\\n    ".join(command), ""])


def _options(submit: SubmitConfig, launch: LaunchConfig, place: Surroundings) -> Iterator[str]:
    yield f"--job-name={_quoted(submit.job_name)}"
    yield f"--nodes={submit.all_nodes(launch)}"
    yield "--ntasks-per-node=1"
    if submit.exclusive:
        yield "--exclusive"
    yield from ("--no-kill", place.requeue, "--open-mode=append")
    if submit.warn_time and place.warning_signal:
        yield f"--signal={place.warning_signal}@{submit.warn_time}"
    for name in ("time", "partition", "account", "array", "gpus_per_node", "cpus_per_task"):
        value = getattr(submit, name)
        if value is not None:
            yield f"--{name.replace('_', '-')}={_quoted(str(value))}"
    yield f"--output={_quoted(submit.output or os.path.join(os.path.normpath(launch.log_dir), '%x_%j.out'))}"
    for word in submit.sbatch_args:
        name, joint, value = word.partition("=")
        yield name + joint + (_quoted(value) if joint else "")


def _quoted(value: str) -> str:
    """Quote a value as sbatch reads it in an #SBATCH line: quotes keep blanks and #, a backslash keeps a quote."""
    if all(c.isalnum() or c in "%@+=:,./_-[]*()" for c in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _container(submit: SubmitConfig, place: Surroundings) -> Iterator[str]:
    """Flags of nvrx-run with which its step runs in the image."""
    if submit.container_image is None:
        return
    places = dict.fromkeys((place.directory, place.log_dir))
    mounts = submit.container_mounts or ",".join(f"{path}:{path}" for path in places)
    workdir = submit.container_workdir or place.directory
    if submit.container_runtime == "apptainer":
        gpus = ["--nv"] if (submit.gpus_per_node or "0").strip("0") else []
        words = [
            "apptainer",
            "exec",
            *gpus,
            f"--bind={mounts}",
            f"--pwd={workdir}",
            submit.container_image,
        ]
        yield from (f"--step-prefix={word}" for word in words)
        return
    yield f"--srun-arg=--container-image={submit.container_image}"
    yield f"--srun-arg=--container-mounts={mounts}"
    yield f"--srun-arg=--container-workdir={workdir}"
    yield "--srun-arg=--no-container-mount-home"
