"""In a batch script or salloc shell: start the step with one agent per node and stay in front of it.

The agents write to files (tasks whose output goes through srun die with srun's host); the front copies the
coordinator's file to its own output, passes signals on, and ends with the job's exit code.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.agent.console import Console
from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.cli.place import KILL_WAIT_ENV, Here, node_range, run_dir
from nvrx_slurm.config import Config, Resolved
from nvrx_slurm.control.auth import TOKEN_ENV, new_token
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.slurm import control
from nvrx_slurm.slurm.launch import NODE_LOG, srun_argv

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_WARNING = (signal.SIGUSR1, signal.SIGUSR2)
_REFRESH_S = 1.0
_LINGER_S = 3.0  # how long srun may take to end once the result is known; a lost node keeps it waiting
_LAST_WORDS_S = 2.0


def step_argv(config: Config, here: Here, directory: RunDir, words: Sequence[str]) -> list[str]:
    """The srun line for this allocation; `words`: our own command line, passed on to the agents."""
    slurm = here.slurm
    nodes = slurm.nnodes if slurm is not None else node_range(config, None).max
    in_container = any("--container-image" in arg for arg in config.launch.srun_args)
    # inside an image our interpreter has another path, so what is on PATH there has to do
    command = ["nvrx-run"] if in_container else [sys.executable, "-m", "nvrx_slurm.cli.run"]
    return srun_argv(
        nodes,
        0 if slurm is None else slurm.cpus_per_task,
        str(directory.path / NODE_LOG),
        [f"--job-name={step_name()}", *config.launch.srun_args],
        [*command, *words],
    )


def step_name() -> str:
    """By which Slurm finds this front's step among others of the job."""
    return f"nvrx-run.{os.getpid()}"


def run_step(resolved: Resolved, here: Here, words: Sequence[str]) -> int:
    """Start the step, wait for its end; returns the job's exit code (the coordinator's word, else srun's)."""
    config = resolved.config
    node_range(config, here.slurm)  # a shape that cannot work is said once, here
    directory = run_dir(config, here, os.environ)
    directory.create()
    log = directory.path / NODE_LOG.replace("%t", "0")
    log.parent.mkdir(exist_ok=True)
    log.touch()
    directory.result.unlink(missing_ok=True)
    argv = step_argv(config, here, directory, words)
    console = Console("nvrx-run", refresh_s=_REFRESH_S)
    console.start()
    console.follow(log, "", 1)
    console.say(shlex.join(argv))
    try:
        assert here.slurm is not None
        return _Step(argv, _step_env(), directory.result, here.slurm.job_id, step_name()).wait(console)
    finally:
        console.finish(_LAST_WORDS_S)


def _step_env() -> dict[str, str]:
    env = dict(os.environ)
    env.setdefault(TOKEN_ENV, new_token())
    env.setdefault(KILL_WAIT_ENV, f"{control.kill_wait_s():g}")
    return env


class _Step:
    """The running srun."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], result: Path, job_id: int, name: str) -> None:
        self._result = result
        self._job_id = job_id
        self._name = name
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd)
        self._handled = {signum: signal.signal(signum, _noted) for signum in (*_ENDING, *_WARNING)}
        try:
            # a session of its own: Ctrl-C reaches srun once, through us
            self._srun = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise NvrxError(f"cannot start srun: {error.strerror}; is Slurm's client installed on this node?") from None
        self._pidfd = os.pidfd_open(self._srun.pid)

    def wait(self, console: Console) -> int:
        """Pass signals on until srun ends; once the result is known srun gets a while, then it is ended."""
        ended_by = 0
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._read_fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(_REFRESH_S * 1000)]
            if self._pidfd in ready:
                break
            if self._read_fd in ready:
                for signum in os.read(self._read_fd, 64):
                    console.say(f"passing {signal.Signals(signum).name} on to the step")
                    self._pass_on(signum)
                    ended_by = signum if signum in _ENDING else ended_by
            elif self._result.exists() and self._outlived(poll):
                console.say(f"the job has ended; srun has not within {_LINGER_S:g} s and is ended now")
                self._srun.kill()
        code = self._srun.wait()
        return self._code(code, ended_by)

    def _pass_on(self, signum: int) -> None:
        """srun hands most signals on, but takes an ending one as an order to kill the step at once."""
        if signum in _ENDING and control.signal_step(self._job_id, self._name, signum):
            return
        self._srun.send_signal(signum)

    def _outlived(self, poll: select.poll) -> bool:
        poll.unregister(self._read_fd)
        ended = bool(poll.poll(_LINGER_S * 1000))
        poll.register(self._read_fd, select.POLLIN)
        return not ended

    def _code(self, srun_code: int, ended_by: int) -> int:
        try:
            return int(json.loads(self._result.read_bytes())["code"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the coordinator could not say how it ended, so srun's word counts
        if ended_by:
            return 128 + ended_by
        return srun_code if srun_code >= 0 else 128 - srun_code


def _noted(signum: int, frame: object) -> None:
    """The wakeup fd carries the signal to the loop."""
