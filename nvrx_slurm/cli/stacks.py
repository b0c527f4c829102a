"""`nvrx stacks`: what the ranks of a running job do now, by the inspection of a hang. It ends nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.child.bootstrap import command
from nvrx_slurm.core.attribution.hang import compare, stack
from nvrx_slurm.core.words import in_words
from nvrx_slurm.node.monitors.inspection import SOCKET
from nvrx_slurm.system.files import agent_dirs
from nvrx_slurm.types import Collective, RankEvidence
from nvrx_slurm.views import complete

_HOW = "a rank has one once it has imported torch or called init_workload_monitoring()"
_ANSWER_S = 10.0
_STEP_S = 60.0
_MOST_BYTES = 1 << 24
_STEP = (
    "--overlap",
    "--ntasks-per-node=1",
    "--mem=0",
    "--gres=none",
    "--input=none",
    "--quiet",
    "--no-kill",
)


@click.command()
@complete.place
@click.option("--here", is_flag=True, hidden=True, help="As JSON, the ranks of this node.")
def stacks(place: Path, here: bool) -> None:
    """Show what each rank of a running job does now: its state, its Python stack, and which rank the others wait for.

    PLACE is a job id, or the directory of a run (default: the latest run). For a Slurm job it inspects all nodes by a
    step of its own, from the allocation or a login node; else the ranks of this node. Ranks go on as before. A rank has
    a stack where it has imported torch (unless --ft-step-hook is off) or called init_workload_monitoring().
    """
    run = place.resolve()
    job = run.parent.name
    if here or not job.isdecimal() or shutil.which("srun") is None:
        found = [*_of_this_node(run)]
    else:
        lines = _of_all_nodes(run, job).splitlines()
        found = [rank for line in lines if line.startswith("[") for rank in json.loads(line)]
    if here:
        return click.echo(json.dumps(found))
    if not found:
        raise click.UsageError(
            f"no rank of {run} was found: it has ended, its agent is stopped, or another user or other nodes run it"
        )
    for line in _tell(
        [_evidence(rank) for rank in {rank["rank"]: rank for rank in found}.values()]
    ):
        click.echo(line)


def _of_this_node(run: Path) -> Iterator[dict[str, Any]]:
    for directory in agent_dirs():
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(_ANSWER_S)
            try:
                stream.connect(os.fspath(directory / SOCKET))
                with stream.makefile("rb") as answer:
                    told = json.loads(answer.read(_MOST_BYTES))
            except (OSError, ValueError):
                continue  # a dead agent's
            if told["run"] == str(run):
                yield from told["ranks"]


def _of_all_nodes(run: Path, job: str) -> str:
    ask = command("nvrx_slurm.cli.toolbox", "stacks", "--here", str(run))
    step = ["srun", f"--jobid={job}", *_STEP, *ask]
    # inside the allocation, srun would take the number of tasks and nodes from the batch script's variables
    env = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(
            step, env=env, capture_output=True, text=True, timeout=_STEP_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        if late.stdout:  # the living nodes have answered
            return late.stdout.decode(errors="replace")
        raise click.UsageError(f"job {job}: srun did not answer within {_STEP_S:g} s") from None
    if done.returncode and not done.stdout:
        raise click.UsageError(
            f"job {job} cannot be inspected: {' '.join(done.stderr.split())[-300:]}"
        )
    return done.stdout


def _evidence(told: dict[str, Any]) -> RankEvidence:
    collectives = tuple(Collective(**one) for one in told.pop("collectives"))
    return RankEvidence(**told | {"frames": tuple(told["frames"]), "collectives": collectives})


def _tell(ranks: list[RankEvidence]) -> Iterator[str]:
    if len(ranks) > 1:  # a rank alone waits for no other
        verdict = compare(ranks)
        culprit = next(iter(verdict.culprits), None)
        first = "" if culprit is None else f"rank {culprit.rank} on node {culprit.host}: "
        yield f"{len(ranks)} ranks; if they hang: {first}{verdict.why} ({verdict.confidence.value})"
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        moves = "moves" if rank.moves else "does not move"
        section = f", in {rank.section}" if rank.section else ""
        silent = f", silent for {in_words(rank.silent_s)}" if rank.silent_s >= 0.0 else ""
        yield f"rank {rank.rank} on node {rank.host}, pid {rank.pid}: state {rank.state}, {moves}{section}{silent}"
        how = "the process is stopped" if rank.state in ("T", "t") else _HOW
        yield stack(rank) or f"  no Python stack: {how}; py-spy dump --pid {rank.pid} shows it now"
