"""nvrx-run in a batch script or salloc shell: starts the step with one agent per node and waits for it.

The agents write to files, because tasks whose output goes through srun die with srun's host. This process copies the
file of the current coordinator to its own output, passes signals on, and ends with the job's exit code.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from nvrx_slurm.cli.job import KILL_WAIT_ENV
from nvrx_slurm.cli.log_tree import RUN_ENV, own_run_dir, result_of, run_dir
from nvrx_slurm.cli.place import Here, node_range
from nvrx_slurm.cli.step import ENDING, REFRESH_S, Step, step_name
from nvrx_slurm.cli.worker import worker_argv
from nvrx_slurm.config.layers import Config, Resolved
from nvrx_slurm.control.auth import TOKEN_ENV, new_token
from nvrx_slurm.core.chain import ended_from_outside
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.node.output.out_file import OUT_ENV
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm import control
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system.files import write_atomic

if TYPE_CHECKING:
    from nvrx_slurm.cli.chain import Chain

NODE_LOG = "agents/agent_%t.log"  # below the run directory; %t is the task, here: the node
_SURVIVAL = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none")
_LAST_WORDS_S = 2.0
_LOGS_READ, _TAIL_BYTES = 8, 4096  # of the agents' logs, for the reason of an end without a coordinator


def step_argv(config: Config, here: Here, directory: RunDir, words: Sequence[str]) -> list[str]:
    """The srun line for this allocation; `words`: the command line of this nvrx-run, passed on to the agents.

    --no-kill: a lost node must not end the step. --kill-on-bad-exit=0, --wait=0: agents decide about restarts and the
    end, srun does not. --mpi=none: no PMI. Output goes to files, because tasks whose output goes through srun die with
    srun's host. There is no input. --cpus-per-task: srun of Slurm 22.05 to 23.02 does not take it from the job.
    """
    slurm, output = here.slurm, directory.path / NODE_LOG
    nodes = slurm.nnodes if slurm is not None else node_range(config, None).max
    per_node = slurm.launchers if slurm is not None else 1
    shape = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    files = ["--input=none", f"--output={output}", f"--error={output}", "--open-mode=append"]
    cpus = [f"--cpus-per-task={slurm.cpus_per_task}"] if slurm is not None and slurm.cpus_per_task else []
    extra = [f"--job-name={step_name()}", *config.launch.srun_args]
    return ["srun", *_SURVIVAL, *shape, *files, *cpus, *extra, *_own_command(config), *words]


def _own_command(config: Config) -> list[str]:
    """How the step's tasks start nvrx-run: as this process was started."""
    if _in_container(config):
        # Inside an image the interpreter has another path; use the one on PATH there.
        return [*config.launch.step_prefix, "nvrx-run"]
    script = Path(sys.argv[0])
    if script.name in ("nvrx-run", "ft_launcher") and script.exists():
        # not `-m`, which would let the user's directory shadow modules of the standard library
        return [sys.executable, str(script.absolute())]
    return [sys.executable, "-m", "nvrx_slurm.cli.run"]


def _in_container(config: Config) -> bool:
    return bool(config.launch.step_prefix) or any("--container-image" in arg for arg in config.launch.srun_args)


def run_step(resolved: Resolved, here: Here, script: str, args: tuple[str, ...], words: Sequence[str]) -> int:
    """Start the step and wait for its end; returns the coordinator's exit code, or srun's if there is none.

    Raises UsageError, before anything is started, for input that cannot work.
    """
    config = resolved.config
    if shutil.which("srun") is None:
        raise UsageError("srun is not on PATH here; install Slurm's client, or start the step from where it is")
    if not _in_container(config):
        worker_argv(config, script, args)
    assert here.slurm is not None
    now = _as_it_is_now(here.slurm)
    changed = now.nodes != here.slurm.nodes
    here = replace(here, slurm=now)
    node_range(config, now)
    console = Console("nvrx-run", refresh_s=REFRESH_S)
    console.start()
    try:
        chain = _chain(config, now, console.say)
        wanted = run_dir(config, now, os.environ)
        code = chain.begin(wanted.log_dir) if chain is not None else None
        if code is not None:
            return code
        directory = own_run_dir(wanted)
        directory.link_latest()  # a coordinator may never begin
        began_s = time.time()
        code = _start_step(config, here, directory, words, console, changed).wait(config.launch.rdzv_conf.join_timeout)
        _complete_result(directory, now, code, began_s, console.say)
        if chain is not None:
            chain.after(code, directory)
        return code
    finally:
        console.finish(_LAST_WORDS_S)


def _start_step(
    config: Config, here: Here, directory: RunDir, words: Sequence[str], console: Console, changed: bool
) -> Step:
    """`changed`: nodes of the allocation are lost since it began."""
    assert here.slurm is not None
    log = directory.path / NODE_LOG.replace("%t", "0")
    log.parent.mkdir(exist_ok=True)
    log.touch()
    argv = step_argv(config, here, directory, words)
    if changed:  # the step that lost a node may hold the CPUs of the others for minutes
        argv[1:1] = [f"--nodelist={','.join(here.slurm.nodes)}", "--overlap"]
    line = shlex.join(argv)
    directory.srun_command.write_text(line + "\n")
    console.follow(log, "", 1)
    verbose, tasks = config.ft.log_level <= logging.DEBUG, here.slurm.nnodes * here.slurm.launchers
    console.say(line if verbose else f"starting {tasks} tasks: the srun command is in {directory.srun_command}")
    return Step(argv, _step_env(config, directory, here.slurm.job_id), log, directory, here.slurm.job_id, console)


def _complete_result(
    directory: RunDir, slurm: SlurmContext, code: int, began_s: float, say: Callable[[str], None]
) -> None:
    """Add what ended a job that got a signal; of a step without a coordinator write the result itself."""
    found, now_s = result_of(directory.path), time.time()
    result = found or {
        "code": code,
        "reason": f"no coordinator has told the end; the agents said last: {_last_words(directory)}",
        "duration_s": now_s - began_s,
        "ended": datetime.fromtimestamp(now_s, timezone.utc).isoformat(timespec="milliseconds"),
    }
    if code - 128 in ENDING and not result.get("out_of_time"):  # Slurm's signal tells no reason
        with suppress(SlurmError):
            job = connect().job(slurm.job_id)
            why = ended_from_outside(job.state, job.reason, job.restarts > slurm.restart_count)
            say(f"job {slurm.job_id} got {Signals(code - 128).name}: {why}")
            result = {**result, "ended_by": why}
    try:
        if result != found:
            write_atomic(directory.result, (json.dumps(result, indent=1) + "\n").encode())
    except OSError as error:
        say(f"cannot write {directory.result}: {error.strerror}")


def _last_words(directory: RunDir) -> str:
    """The last line of each agent's log, each once."""
    words = []
    for log in sorted((directory.path / "agents").glob("agent_*.log"))[:_LOGS_READ]:
        with suppress(OSError, IndexError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            words.append(file.read().decode(errors="replace").splitlines()[-1])
    return "; ".join(dict.fromkeys(words)) or "nothing"


def _chain(config: Config, slurm: SlurmContext, say: Callable[[str], None]) -> Chain | None:
    """The chain that this job is a link of; None for most jobs."""
    if not config.launch.until_done and config.launch.chain_links is None:
        return None
    from nvrx_slurm.cli.chain import Chain

    return Chain(config, slurm, connect(), say)


def _as_it_is_now(slurm: SlurmContext) -> SlurmContext:
    """The job's nodes of this moment: the variables are as old as the batch script, and nodes may be lost since."""
    nodes = control.job_nodes(slurm.job_id)
    if not nodes or tuple(nodes) == slurm.nodes:
        return slurm
    return replace(slurm, nodes=tuple(nodes), nnodes=len(nodes))


def _step_env(config: Config, directory: RunDir, job_id: int) -> dict[str, str]:
    """An image may be without Slurm's tools, so the agents are told what they would ask."""
    env = {**os.environ, RUN_ENV: directory.run, OUT_ENV: os.path.realpath("/proc/self/fd/1")}
    if _in_container(config) and control.END_TIME not in env:  # Slurm 22.05
        left_s = control.time_left_s(job_id)
        env |= {control.END_TIME: f"{time.time() + left_s:.0f}"} if left_s is not None and left_s < math.inf else {}
    env[TOKEN_ENV] = env.get(TOKEN_ENV) or new_token()
    env[KILL_WAIT_ENV] = env.get(KILL_WAIT_ENV) or f"{control.kill_wait_s():g}"
    return env
