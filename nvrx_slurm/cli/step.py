"""The running srun: passes signals on, waits for its end, finds the job's exit code."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.cli.log_tree import result_of
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm import srun
from nvrx_slurm.slurm.api.facts import NoAnswer, SlurmError
from nvrx_slurm.slurm.control import Control

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
REFRESH_S = 1.0
_ASK_S = 15.0  # between two questions whether a step without srun still runs
_NOT_YET, _RELEASED = -1, -2
_LINGER_S = 3.0  # how long srun may take to end once the result is known; a lost node keeps it waiting


def step_name() -> str:
    """Name of the step that this process starts, by which Slurm tells it from other steps of the job."""
    return f"nvrx-run.{os.getpid()}"


class Step:
    """The running srun. It dies with this process, also by SIGKILL, and the step dies with it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        log: Path,
        run_dir: RunDir,
        job_id: int,
        control: Control,
        console: Console,
    ) -> None:
        """`log`: the first coordinator's output, which the console follows already."""
        self._log, self._run_dir = log, run_dir
        self._followed = {log}
        self._job_id, self._control = job_id, control
        self._name = step_name()
        self._console, self._say = console, console.say
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd)
        for signum in (*ENDING, *WARNING):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # an ignored signal (nohup) stays ignored
                signal.signal(signum, _noted)
        self._srun = processes.start(argv, env, 1, 2)
        self._held = _NOT_YET  # a descriptor that keeps the step alive should srun be killed
        self._lost = 0  # negative: the signal that killed srun; the step lives on
        self._ask_at = 0.0
        self._started_s = time.monotonic()

    def wait(self, start_timeout_s: float) -> int:
        """Pass signals on until srun ends; returns the job's exit code.

        A step that Slurm has not started after `start_timeout_s` is given up. Once the result is known, srun is
        killed if it does not end within 3 s.
        """
        ended_by = 0
        poll = select.poll()
        poll.register(self._srun.pidfd, select.POLLIN)
        poll.register(self._read_fd, select.POLLIN)
        started = False
        while True:
            ready = [fd for fd, _ in poll.poll(REFRESH_S * 1000)]
            self._follow_the_coordinator()
            if self._held == _NOT_YET and self._srun.pidfd not in ready:
                self._held = srun.hold(self._srun.pid)
            if self._srun.pidfd in ready:
                poll.unregister(self._srun.pidfd)
                self._lost = self._srun.reap()
                if self._lost >= 0 or self._held < 0:
                    return self._code(self._lost, ended_by)
                started = True
                how = signal.Signals(-self._lost).name
                self._say(f"srun was killed by {how}, perhaps for lack of memory: the job goes on without it")
            if self._read_fd in ready:
                ended_by = self._pass_signals_on() or ended_by
            elif self._run_dir.result.exists() or (self._lost < 0 and not self._runs()):
                self._end_lingering()
                if self._lost < 0:
                    return self._code(self._lost, ended_by)
            elif not started and time.monotonic() >= self._started_s + start_timeout_s:
                started = self._log_has_begun() or self._control.step_id(self._job_id, self._name) is not None
                if not started:
                    return self._give_up(start_timeout_s)

    def _runs(self) -> bool:
        """Whether Slurm knows the step, as far as it answers; asked every 15 s."""
        if time.monotonic() < self._ask_at:
            return True
        self._ask_at = time.monotonic() + _ASK_S
        try:
            return any(step.name == self._name for step in self._control.slurm.steps(self._job_id))
        except SlurmError as error:
            return isinstance(error, NoAnswer)

    def _follow_the_coordinator(self) -> None:
        """After an election the console goes on where another coordinator writes."""
        found = self._run_dir.console_of()
        if found is not None and found[0] not in self._followed:
            self._followed.add(found[0])
            self._console.follow(found[0], "", 1, found[1])

    def _give_up(self, start_timeout_s: float) -> int:
        self._say(
            f"Slurm has not started the step within {start_timeout_s:g} s (join timeout): its nodes are lost or"
            " busy with another step of this job; add --srun-arg=--overlap to share them"
        )
        self._signal(signal.SIGKILL)
        self._srun.reap()
        return ExitCode.TOO_FEW_NODES

    def _pass_signals_on(self) -> int:
        """Returns the last ending signal among them, 0 if there was none."""
        ended_by = 0
        for signum in os.read(self._read_fd, 64):
            self._say(f"passing {signal.Signals(signum).name} on to the step")
            ended_by = signum if signum in ENDING else ended_by
            # srun would kill the step at once for an ending signal; Slurm delivers just the signal
            if signum not in ENDING or not self._control.signal_step(self._job_id, self._name, signum):
                self._signal(signum)
        return ended_by

    def _end_lingering(self) -> None:
        if self._lost < 0:
            select.select([], [], [], _LINGER_S)  # for the agents to leave
            self._signal(signal.SIGKILL)  # else Slurm takes the step for running
        elif not select.select([self._srun.pidfd], [], [], _LINGER_S)[0]:
            self._say(f"the job has ended but srun has not within {_LINGER_S:g} s: it is killed")
            self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self._lost < 0:
            self._control.signal_step(self._job_id, self._name, signum)
            return
        if signum not in WARNING and self._held >= 0:
            os.close(self._held)  # the step shall end with srun
            self._held = _RELEASED
        signal.pidfd_send_signal(self._srun.pidfd, signum)

    def _log_has_begun(self) -> bool:
        with suppress(OSError):
            return self._log.stat().st_size > 0
        return False

    def _code(self, srun_code: int, ended_by: int) -> int:
        result = result_of(self._run_dir.path)
        if "code" in result:
            return int(result["code"])
        if ended_by or srun_code < 0:  # the coordinator left no result
            return 128 + (ended_by or -srun_code)
        if srun_code > 128 and self._log_has_begun():
            self._say("the coordinator was lost and left no result; see the agents' logs")
            return ExitCode.COORDINATOR_LOST
        return srun_code


def _noted(signum: int, frame: object) -> None:
    """The wakeup fd carries the signal to the loop."""
