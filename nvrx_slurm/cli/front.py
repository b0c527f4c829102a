"""nvrx-run in a batch script or salloc shell: starts the step with one agent per node and waits for it.

The agents write to files, because tasks whose output goes through srun die with srun's host. This process copies the
file of the current coordinator to its own output, passes signals on, and ends with the job's exit code.
"""

from __future__ import annotations

import logging
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.cli.chain import Chain
from nvrx_slurm.cli.ending import ENDING, complete_result
from nvrx_slurm.cli.here import (
    RUN_ENV,
    STDIN_ENV,
    Here,
    as_it_is_now,
    node_range,
    own_run_dir,
    passes_input_on,
    run_dir,
)
from nvrx_slurm.cli.job import BEGAN_ENV, JOB_NAME_ENV, KILL_WAIT_ENV, worker_argv
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.control.auth import TOKEN_ENV, new_token
from nvrx_slurm.core.chain import Outside
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode, UsageError
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.node.output.out_file import OUT_ENV
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm import share, srun
from nvrx_slurm.slurm.api.facts import NoAnswer, SlurmError
from nvrx_slurm.slurm.control import END_TIME, Control
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.views.log_tree import result_of

NODE_LOG = "agents/agent_%t.log"  # below the run directory; %t is the task, here: the node
_SURVIVAL = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none")
_FLUSH_S = 2.0
WARNING = (signal.SIGUSR1, signal.SIGUSR2)
REFRESH_S = 1.0
_ASK_S = 15.0  # between two questions whether a step without srun still runs
_NOT_YET = -1
_RELEASED = -2
# how long srun may take to end once the result is known; a lost node keeps it waiting
_LINGER_S = 3.0


def step_argv(here: Here, directory: RunDir, words: Sequence[str]) -> list[str]:
    """The srun line for this allocation; `words`: the command line of this nvrx-run, passed on to the agents.

    --no-kill: a lost node must not end the step. --kill-on-bad-exit=0, --wait=0: agents decide about restarts and the
    end, srun does not. --mpi=none: no PMI. Output goes to files, because tasks whose output goes through srun die with
    srun's host. A terminal's input goes to the only rank. Several agents per node share it as tasks do;
    --cpus-per-task: srun of Slurm 22.05 to 23.02 does not take it from the job.
    """
    slurm = here.slurm
    output = directory.path / NODE_LOG
    nodes = slurm.nnodes if slurm is not None else node_range(here).max
    per_node = slurm.launchers if slurm is not None else 1
    shape = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
    stdin = "0" if passes_input_on(here, nodes * per_node) else "none"
    files = [f"--input={stdin}", f"--output={output}", f"--error={output}", "--open-mode=append"]
    if per_node == 1:
        resources = share.srun_options(here.env)
    else:
        cpus = slurm.cpus_per_task if slurm is not None else 0
        resources = ["--export=ALL", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    extra = [f"--job-name={step_name()}", *here.launch.srun_args]
    own = _own_command(here.launch)
    return ["srun", *_SURVIVAL, *shape, *files, *resources, *extra, *own, *words]


def _own_command(launch: LaunchConfig) -> list[str]:
    """How the step's tasks start nvrx-run: as this process was started."""
    if _in_container(launch):
        # Inside an image the interpreter has another path; use the one on PATH there.
        return [*launch.step_prefix, "nvrx-run"]
    script = Path(sys.argv[0])
    if script.name in ("nvrx-run", "ft_launcher") and script.exists():
        # not `-m`, which would let the user's directory shadow modules of the standard library
        return [sys.executable, str(script.absolute())]
    return [sys.executable, "-m", "nvrx_slurm.cli.run"]


def _in_container(launch: LaunchConfig) -> bool:
    """Whether the tasks run in a container, by pyxis or CSCS's plugin."""
    by_srun = any("--container-image" in arg or "--environment" in arg for arg in launch.srun_args)
    return bool(launch.step_prefix) or by_srun


def run_step(here: Here, script: str, args: tuple[str, ...], words: Sequence[str]) -> int:
    """Start the step and wait for its end; returns the coordinator's exit code, or srun's if there is none.

    Raises UsageError, before anything is started, for input that cannot work.
    """
    if shutil.which("srun") is None:
        raise UsageError(
            "srun is not on PATH here; install Slurm's client, or start the step from where it is"
        )
    if not _in_container(here.launch):
        worker_argv(here.launch, script, args)
    assert here.slurm is not None
    slurm = as_it_is_now(here, here.slurm)
    changed = slurm.nodes != here.slurm.nodes
    began_s = time.time()
    here = replace(here, slurm=slurm, env={**os.environ, BEGAN_ENV: f"{began_s:.3f}"})
    node_range(here)
    prompts = passes_input_on(here, slurm.nnodes * slurm.launchers)
    console = Console("nvrx-run", refresh_s=REFRESH_S, prompts=prompts, began_s=began_s)
    try:
        chain = None
        if here.launch.until_done or here.launch.chain_links is not None:
            chain = Chain(here.resolved.config, slurm, here.control.slurm, console.say)
        wanted = run_dir(here)
        code = chain.begin(wanted.log_dir) if chain is not None else None
        if code is not None:
            return code
        directory = own_run_dir(wanted)
        directory.link_latest()  # a coordinator may never begin
        console.draw(directory.status)
        step = _start_step(here, slurm, directory, words, console, changed)
        code = step.wait(here.launch.rdzv_conf.join_timeout)
        outside = complete_result(here.control, slurm, directory, code, began_s, console.say)
        if outside is Outside.PREEMPTED and chain is None and here.control.requeues(slurm.job_id):
            # it has left after the notice: Slurm, which requeues it after the GraceTime, would find it failed
            chain = Chain(here.resolved.config, slurm, here.control.slurm, console.say)
        if outside is not None and not (chain is not None and chain.requeues):
            name = signal.Signals(code - 128).name
            requeues = chain is not None or outside is not Outside.PREEMPTED
            way = "" if requeues else "; --until-done would requeue it"
            console.say(f"job {slurm.job_id} got {name}: {outside.value}{way}")
        if chain is not None:
            chain.after(code, directory, outside)
        return code
    finally:
        console.finish(_FLUSH_S)


def _start_step(
    here: Here,
    slurm: SlurmContext,
    directory: RunDir,
    words: Sequence[str],
    console: Console,
    changed: bool,
) -> Step:
    """`changed`: nodes of the allocation are lost since it began."""
    log = directory.path / NODE_LOG.replace("%t", "0")
    log.parent.mkdir(exist_ok=True)
    log.touch()
    argv = step_argv(here, directory, words)
    if changed:  # the step that lost a node may hold the CPUs of the others for minutes
        argv[1:1] = [f"--nodelist={','.join(slurm.nodes)}", "--overlap"]
    line = shlex.join(argv)
    directory.srun_command.write_text(line + "\n")
    console.follow(log, "", 1)
    if components := os.environ.get("SLURM_HET_SIZE"):
        console.say(
            f"the job is heterogeneous: this run has the first of its {components} components, {slurm.nnodes} nodes;"
            " ask for one component to train on all"
        )
    verbose = here.ft.log_level <= logging.DEBUG
    tasks = slurm.nnodes * slurm.launchers
    console.say(
        line
        if verbose
        else f"starting {tasks} tasks: the srun command is in {directory.srun_command}"
    )
    env = _step_env(here, slurm, directory, argv)
    return Step(argv, env, directory, slurm.job_id, here.control, console)


def _step_env(
    here: Here, slurm: SlurmContext, directory: RunDir, argv: Sequence[str]
) -> dict[str, str]:
    """An image may be without Slurm's tools, so the agents are told what they would ask."""
    asked = share.srun_env(os.environ) if slurm.launchers == 1 else os.environ
    env = {**asked, RUN_ENV: directory.run, BEGAN_ENV: here.env[BEGAN_ENV]}
    env[OUT_ENV] = os.path.realpath("/proc/self/fd/1")
    if _in_container(here.launch) and END_TIME not in env:  # Slurm 22.05
        left_s = here.control.time_left_s(slurm.job_id)
        env |= (
            {END_TIME: f"{time.time() + left_s:.0f}"}
            if left_s is not None and left_s < math.inf
            else {}
        )
    if "--input=0" in argv:
        env[STDIN_ENV] = "1"
    env[share.DEVICES_ENV] = share.own_devices(env, slurm.nnodes) if slurm.launchers == 1 else ""
    env[JOB_NAME_ENV] = env.get(JOB_NAME_ENV) or env.get("SLURM_JOB_NAME", "")
    env[TOKEN_ENV] = env.get(TOKEN_ENV) or new_token()
    env[KILL_WAIT_ENV] = env.get(KILL_WAIT_ENV) or f"{here.control.kill_wait_s():g}"
    return env


# --- the running srun -------------------------------------------------------------------------------------------------


def step_name() -> str:
    """Name of the step that this process starts, by which Slurm tells it from other steps of the job."""
    return f"nvrx-run.{os.getpid()}"


class Step:
    """The running srun. It dies with this process, also by SIGKILL, and the step dies with it."""

    def __init__(
        self,
        argv: Sequence[str],
        env: dict[str, str],
        run_dir: RunDir,
        job_id: int,
        control: Control,
        console: Console,
    ) -> None:
        """The console follows the first coordinator's output already."""
        self._run_dir = run_dir
        self._job_id = job_id
        self._control = control
        self._log = run_dir.path / NODE_LOG.replace("%t", "0")
        self._followed = {self._log}
        self._name = step_name()
        self._console = console
        self._say = console.say
        self._read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd)
        for signum in (*ENDING, *WARNING):
            # an ignored signal (nohup) stays ignored
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _noted)
        stdin = 0 if STDIN_ENV in env else subprocess.DEVNULL
        self._srun = processes.start(argv, env, 1, 2, stdin=stdin)
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
                self._say(
                    f"srun was killed by {how}, perhaps for lack of memory: the job goes on without it"
                )
            if self._read_fd in ready:
                ended_by = self._pass_signals_on() or ended_by
            elif self._run_dir.result.exists() or (self._lost < 0 and not self._runs()):
                self._end_lingering()
                if self._lost < 0:
                    return self._code(self._lost, ended_by)
            elif not started and time.monotonic() >= self._started_s + start_timeout_s:
                started = (
                    self._log_has_begun()
                    or self._control.step_id(self._job_id, self._name) is not None
                )
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
        """Go on to show the lines of another coordinator after an election."""
        found = self._run_dir.console_of()
        if found is not None and found[0] not in self._followed:
            self._followed.add(found[0])
            self._console.follow(found[0], "", 1, found[1])

    def _give_up(self, start_timeout_s: float) -> int:
        self._say(
            f"Slurm has not started the step within {start_timeout_s:g} s (join timeout): its nodes are lost or"
            " busy with another step of this job; add --srun-arg=--overlap to share them, and set CUDA_VISIBLE_DEVICES"
            " for each run, as they share the GPUs, too"
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
            if signum not in ENDING or not self._control.signal_step(
                self._job_id, self._name, signum
            ):
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
