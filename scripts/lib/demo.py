"""`scripts/demo`: a training job loses a rank, hangs, loses two nodes, and ends like one that nothing happened to.

The second of them coordinates the job and, with Slurm, runs the batch script.

Every fault is injected when the training has made progress since the last one, is counted, and must be recognised for
what it is. Afterwards the same training runs undisturbed, and the last lines of both (step, loss, hash of all
weights) must be equal to the bit. Ends with 0 only if all of that was checked and nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import minicluster_init as init
from stage import WORLD_SIZE, LocalStage, SlurmStage, await_end, make_stage, running_with

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.system.inotify import Inotify

_SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ddp_sections.py"
_STEPS, _CHECKPOINT_EVERY, _STEP_TIME_S = 200, 20, 0.04
_PROGRESS_STEPS = 25  # between two faults: more than a checkpoint, so that each restart resumes further on
_RECOVERY_TIMEOUT_S = 60.0
_RUN_TIMEOUT_S = 120.0
_FINAL = "final step "


class DemoError(NvrxError):
    """The demo could not go on; the sentence says where to look."""


@dataclass
class Checks:
    """What was checked, and whether all of it held."""

    failed: int = 0
    done: int = 0

    def __call__(self, what, holds, otherwise=""):
        """Print one check; `otherwise`: what was found where it does not hold."""
        self.done += 1
        self.failed += not holds
        print(f"  {'ok    ' if holds else 'FAILED'}  {what}" + (f": {otherwise}" if not holds else ""), flush=True)


@dataclass
class Injected:
    """A fault that was injected for certain, and when training went on after it."""

    cause: str  # words that the job must say of it
    what: str
    wall: float
    trains_again: float = 0.0  # every rank has done a step since


@dataclass
class Run:
    """One training run on the stage."""

    stage: SlurmStage | LocalStage
    directory: Path
    faults: list[Injected] = field(default_factory=list)
    started: float = 0.0
    pids: dict[int, int] = field(default_factory=dict)  # rank -> pid, of the cycle that trains
    exit_code: int = -1
    told: str = ""  # how the place tells the end

    def start(self):
        """Submit it."""
        self.directory.mkdir()
        script = [str(_SCRIPT), f"--steps={_STEPS}", f"--step-time={_STEP_TIME_S}"]
        script += [f"--checkpoint-dir={self.directory}/checkpoints", f"--checkpoint-every={_CHECKPOINT_EVERY}"]
        script += [f"--progress-file={self.directory}/progress"]
        self.started = time.time()
        say(self.stage.start(self.directory, script))

    @property
    def run_dir(self):
        """The log tree of the run."""
        return self.directory / "logs" / "latest"

    def await_training(self):
        """Wait until every rank is a new process and has done a step."""
        old = self.pids
        seen = self._await_progress(lambda now: all(now[r][1] != old.get(r) for r in now))
        if self.faults:
            self.faults[-1].trains_again = time.time()
        self.pids = {rank: pid for rank, (_, pid) in seen.items()}
        first = min(step for step, _ in seen.values())
        self.say(f"all {WORLD_SIZE} ranks train, at step {first}")
        self._await_progress(lambda now: min(step for step, _ in now.values()) >= first + _PROGRESS_STEPS)

    def inject(self, cause, act):
        """Do something bad (`act` returns what it was) and count it; training has not gone on since, of course."""
        wall = time.time()
        self.faults.append(Injected(cause, act(), wall))
        self.say(f"!! {self.faults[-1].what}")

    def process_on(self, rank, node):
        """The process of a rank; DemoError unless it runs on the node with that infra rank."""
        found = init.process(self.pids[rank])
        if found is None or f"/node_{node}_" not in os.readlink(f"/proc/{found.pid}/fd/1"):  # its log
            raise DemoError(f"rank {rank} does not run on node {node}, so the loss of that would show nothing")
        return found

    def finish(self):
        """Wait for the end."""
        self.exit_code, self.told = self.stage.wait(_RUN_TIMEOUT_S)
        self.say(self.told)

    def final_line(self):
        """The training's own last line; a sentence where there is none."""
        outputs = sorted(self.run_dir.glob("cycle_*/node_*/rank_0.out"))
        lines = [x for path in outputs for x in path.read_text().splitlines() if x.startswith(_FINAL)]
        return lines[-1] if lines else f"no final line in {self.run_dir}/cycle_*/node_*/rank_0.out"

    def say(self, text):
        """Print with the time since the start."""
        say(f"{time.time() - self.started:6.1f} s  {text}")

    def _await_progress(self, done):
        """Wait for `done` of {rank: (step, pid)}; DemoError when the job ends before, or after a minute."""
        deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
        changes = Inotify()
        try:
            changes.watch(str(self.directory))
            while True:
                now = self._progress()
                if len(now) == WORLD_SIZE and done(now):
                    return now
                if not select.select([changes.fd], [], [], 1.0)[0]:
                    if self.stage.ended() or time.monotonic() > deadline:
                        raise DemoError(f"the training does not go on, last seen at {now}; read {self.run_dir}/agents")
                    continue
                changes.wait()
        finally:
            changes.close()

    def _progress(self):
        found = {}
        for rank in range(WORLD_SIZE):
            try:
                step, pid = (self.directory / f"progress.{rank}").read_text().split()
                found[rank] = int(step), int(pid)
            except FileNotFoundError:
                continue
        return found


def say(text):
    """Print at once."""
    print(text, flush=True)


def signalled(run, rank, signum):
    """Send a signal to a rank's process; DemoError if that process is gone (then nothing was injected)."""
    target = init.process(run.pids[rank])
    if target is None or not init.signal_process(target, signum):
        raise DemoError(f"rank {rank} (pid {run.pids[rank]}) ended before it could get {signum.name}")
    return f"{signum.name} to rank {rank} (pid {target.pid})"


def node_lost(run, infra_rank, ranks):
    """Kill all of a node; DemoError if `ranks` did not run there or live on."""
    victims = [run.process_on(rank, infra_rank) for rank in ranks]
    name = run.stage.lose_node(infra_rank)
    if alive := await_end(victims, 1.0):
        raise DemoError(f"node {name} is lost, but {alive} live on")
    return f"{name} lost: all its processes killed at once, ranks {ranks[0]} and {ranks[-1]} among them"


def disturbed(stage, directory):
    """The run with a crash, a hang, a lost node, and the loss of the coordinator's node."""
    run = Run(stage, directory)
    run.start()
    run.await_training()
    run.inject("was killed by SIGKILL", lambda: signalled(run, 3, signal.SIGKILL))
    run.await_training()
    run.inject("hung", lambda: signalled(run, 1, signal.SIGSTOP) + ": it hangs, and with it all ranks")
    run.await_training()
    run.inject("was lost", lambda: node_lost(run, 1, (2, 3)))
    run.await_training()
    run.inject("was lost", lambda: node_lost(run, 0, (0, 1)) + ": it coordinated the job")
    run.await_training()
    run.finish()
    return run


def undisturbed(stage, directory):
    """The same training, left alone."""
    run = Run(stage, directory)
    run.start()
    run.finish()
    return run


def nvrx(*words):
    """Run the toolbox that users have."""
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def report(run):
    """Print what the job tells of itself, and how fast it was; whether each fault was recognised for what it was."""
    say("\n" + nvrx("why", str(run.run_dir)).stdout)
    path = run.run_dir / "result.json"
    restarts = json.loads(path.read_text())["restarts"] if path.exists() else []
    say("Fault                      noticed after     next cycle after   every rank trains again after")
    for fault, restart in zip(run.faults, restarts, strict=False):
        noticed_s = datetime.fromisoformat(restart["time"]).timestamp() - fault.wall
        planned_s = noticed_s + restart["down_s"]
        name = fault.what.partition(":")[0].partition(" (")[0]
        say(f"{name:26} {noticed_s:9.3f} s {planned_s:18.3f} s {fault.trains_again - fault.wall:26.1f} s")
    say("(the last column is mostly the start of the ranks: imports unless they are warm, gloo, the checkpoint)")
    return [fault.cause in restart["cause"] for fault, restart in zip(run.faults, restarts, strict=False)]


def check(run, recognised, calm, checks):
    """Print what is right and what is not."""
    checks("four faults were injected", len(run.faults) == 4, run.faults)
    checks("each was recognised for what it was", recognised == [True] * 4, recognised)
    cycles = sorted(path.name for path in run.run_dir.glob("cycle_*"))
    checks("four restarts, no more", cycles == [f"cycle_{i}" for i in range(5)], cycles)
    stacks = [p for p in run.run_dir.glob("cycle_1/node_*/rank_*.err") if "most recent call first" in p.read_text()]
    checks("the Python stacks of a hung rank are in its log", bool(stacks), f"{run.run_dir}/cycle_1")
    checks(f"the disturbed run ended with 0: {run.told}", run.exit_code == 0, run.exit_code)
    checks("the undisturbed run ended with 0", calm.exit_code == 0, calm.exit_code)
    first, second = run.final_line(), calm.final_line()
    equal = first == second and first.startswith(f"{_FINAL}{_STEPS} ")
    checks("step, loss and weights are bitwise equal", equal, f"\n    {first}\n    {second}")
    if equal:
        say(f"          {first}")


def play(stage, root, checks):
    """Both runs, the report, the checks."""
    started = time.monotonic()
    stage.open()
    say(f"up in {time.monotonic() - started:.1f} s; now the training with four faults")
    run = disturbed(stage, root / "faults")
    say("\nand the same training undisturbed")
    calm = undisturbed(stage, root / "calm")
    recognised = report(run)
    say("\nChecks")
    check(run, recognised, calm, checks)
    write_report(run.run_dir, checks)


def clean_up(stage, root, checks):
    """End everything, and look whether that is so."""
    stage.close()
    left = await_end(running_with(str(root)), 2.0)
    checks("the cluster is down and nothing is left running", not left, left)
    for one in left:
        init.signal_process(one, signal.SIGKILL)


def write_report(run_dir, checks):
    """What happened, as a page with pictures, by nvrx report. It stays where the logs do not."""
    page = Path(tempfile.gettempdir()) / "nvrx-demo-report.html"
    done = nvrx("report", str(run_dir), "--output", str(page))
    checks("nvrx report has drawn it", done.returncode == 0, done.stderr)
    say(f"\nopen it in a browser: {page}")


def _environment(root):
    """What the jobs inherit: our nvrx-run first, CPUs and loopback only, and nothing left in /tmp by a lost node."""
    os.environ["TMPDIR"] = str(root)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _interrupted(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    """Play, check, clean up; returns 0 only if every check held."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__, add_help=True)
    parser.add_argument("--no-slurm", action="store_true", help="four nvrx-run agents by hand instead of a cluster")
    parser.add_argument("--keep", action="store_true", help="keep the logs (they are kept anyway when a check fails)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupted)
    started = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="nvrx-demo-"))
    _environment(root)
    stage, why_not = make_stage(root / "c", not args.no_slurm)
    if why_not:
        say(f"This demo goes on without Slurm: {why_not}")
    say(f"The stage: {stage.title}, files in {root}")
    checks, complete = Checks(), False
    try:
        play(stage, root, checks)
        complete = True
    except KeyboardInterrupt:
        say("interrupted; cleaning up")
    except NvrxError as error:
        say(f"FAILED: {error}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # cleaning up takes a second and is not to be interrupted
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        clean_up(stage, root, checks)
    good = complete and checks.failed == 0
    if good and not args.keep:
        shutil.rmtree(root)
    else:
        say(f"logs: {root}")
    verdict = f"all {checks.done} checks held" if good else "the demo FAILED"
    say(f"\n{verdict}; {time.monotonic() - started:.0f} s, {stage.title}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
