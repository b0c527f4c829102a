"""`scripts/dev/gpu-trial`: rows of a trial on real GPUs, each bounded and by itself; a table and gpu-trial.json.

Without a GPU the rows run with gloo and a stand-in of NVML, and what needs a GPU is "untried". Exit code 0: no row
failed; 1: one did; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from heard import Heard
from standin import StandIn, built

from nvrx_slurm.child.descendants import children
from nvrx_slurm.system import gpu_facts, gpus
from nvrx_slurm.system.hardware import Absent, HardwareError

WAITING = ("nvrx-template", "nvrx-standby")  # the titles of processes that wait
WORKER = str(Path(__file__).with_name("trial_worker.py"))
_BOUND_S = 180.0
_POLL_S = 0.05
_RECLAIM_BOUND_S = 60.0
_TOLERANCE_MB = 64.0


class Untried(Exception):
    """The machine lacks what this row needs."""


class Failed(Exception):
    """What was tried did not happen."""


class Job(Heard):
    """One nvrx-run of the trial's worker, whose lines are JSON."""

    def __init__(self, directory, mode, *flags, nproc):
        command = [sys.executable, "-m", "nvrx_slurm.cli.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += ["--max-restarts=2", f"--log-dir={directory}/logs", *flags, WORKER, *mode.split()]
        self.logs = directory / "logs"
        super().__init__(command)

    def __enter__(self):
        return self

    @property
    def text(self):
        """All output so far."""
        return "".join(self.lines)

    def told(self):
        """What the workers have told."""
        found = (line[line.find('{"say"') :] for line in self.lines if '{"say"' in line)
        return [json.loads(line) for line in found]

    def await_words(self, what, count, **of):
        """The first `count` lines `what` with these values. Raises Failed."""
        of["say"] = what

        def look():
            found = [one for one in self.told() if of.items() <= one.items()]
            return found[:count] if len(found) >= count else None

        found = self.find(look, time.monotonic() + _BOUND_S)
        if found is None:
            raise Failed(f"no {count} x {of}; the job said: {self.text[-1500:]}")
        return found

    def end(self):
        """Its exit code."""
        code = self.wait(_BOUND_S)
        if code is None:
            raise Failed(f"the job does not end: {self.text[-1500:]}")
        return code


class Trial:
    """What all rows share."""

    def __init__(self, directory, gpus_here):
        self.directory, self.gpus = directory, gpus_here
        self.ranks = gpus_here or 2
        self._jobs = 0

    def job(self, mode, *flags, nproc=""):
        self._jobs += 1
        place = self.directory / str(self._jobs)
        place.mkdir()
        return Job(place, mode, *flags, nproc=nproc or str(self.ranks))

    def needs_gpus(self, count, what):
        if self.gpus < count:
            raise Untried(f"{what} needs {count} GPU{'s' * (count > 1)}, here are {self.gpus}")

    def used_mb(self):
        """Of all GPUs together."""
        return sum(gpus.memory_used_mb({}).values())


def facts(trial):
    """What NVML tells."""
    rows = {"driver": gpu_facts.driver_version(), "gpus": trial.gpus}
    for name in ("ecc_errors", "remapped_rows", "throttle_reasons", "temperatures", "persistence", "fabric"):
        rows[name] = getattr(gpu_facts, name)({})
    rows |= {"nvlinks": gpus.nvlinks({}), "recovery": gpus.recovery_actions({}), "used_mb": gpus.memory_used_mb({})}
    return {name: str(value) for name, value in rows.items()}


def checks(trial):
    """Each health check that reads GPUs."""
    ended = subprocess.run(
        [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "run", "--json"],
        capture_output=True, text=True, timeout=_BOUND_S, check=False,
    )  # fmt: skip
    findings = json.loads(ended.stdout)["findings"]
    about = [one for one in findings if "gpu" in one["check"] or "nv" in one["check"]]
    found = {one["check"]: f"{one['verdict']}: {one['text']}" for one in about}
    if not found:
        raise Failed(f"no check reads GPUs: {ended.stdout[:500]}")
    bad = [name for name, text in found.items() if text.startswith(("fail", "unknown"))]
    if bad and trial.gpus:
        raise Failed(f"{bad}: {[found[name] for name in bad]}")
    return found


def ranks_by_gpu(trial):
    """--nproc-per-node gpu: one rank per GPU."""
    trial.needs_gpus(1, "one rank per GPU")
    with trial.job("count", nproc="gpu") as job:
        found = job.await_words("here", trial.gpus)
        if job.end() or len(job.told()) != trial.gpus:
            raise Failed(f"{len(job.told())} ranks for {trial.gpus} GPUs")
    return {"ranks": len(found)}


def numa(trial):
    """--numa-bind auto: the CPUs of each rank."""
    trial.needs_gpus(1, "NUMA binding by GPU")
    with trial.job("count", "--numa-bind=auto") as job:
        found = job.await_words("here", trial.ranks)
    return {f"rank {one['rank']}": f"{len(one['affinity'])} CPUs, first {one['affinity'][0]}" for one in found}


def _reclaim(trial, before_mb, since_s):
    """Seconds until the device memory is as it was; None without a GPU."""
    if not trial.gpus:
        return None
    while trial.used_mb() > before_mb + _TOLERANCE_MB * trial.gpus:
        if time.monotonic() - since_s > _RECLAIM_BOUND_S:
            raise Failed(f"{trial.used_mb() - before_mb:.0f} MB are still used after {_RECLAIM_BOUND_S:g} s")
        time.sleep(0.02)
    return round(time.monotonic() - since_s, 3)


def _fault(trial, mode, *flags):
    """A job survives a fault of its last rank; then the same without a restart, for the memory."""
    with trial.job(mode, *flags) as job:
        job.await_words("step", trial.ranks, cycle=0)
        faulty = job.await_words("faulty", 1)[0]
        since_s = time.monotonic()
        if mode == "crash":
            os.kill(faulty["pid"], signal.SIGKILL)
        again = job.await_words("step", trial.ranks, cycle=1)
        if job.end():
            raise Failed(f"the job ended badly: {job.text[-1500:]}")
    first_step_s = max(one["at_s"] for one in again) - since_s
    imported_s = max(one["imported_s"] for one in again) - since_s
    before_mb = trial.used_mb() if trial.gpus else 0.0
    with trial.job(mode, *flags, "--max-restarts=0") as job:
        faulty = job.await_words("faulty", 1)[0]
        at_s = time.monotonic()
        if mode == "crash":
            os.kill(faulty["pid"], signal.SIGKILL)
        job.end()
        reclaimed_s = _reclaim(trial, before_mb, at_s)
    found = {"imported_s": round(imported_s, 3), "first_step_s": round(first_step_s, 3), "reclaimed_s": reclaimed_s}
    return found | {"forked": [one["forked"] for one in again], "backend": again[0]["backend"]}


_HANG = ("--ft-rank-heartbeat-timeout=5", "--ft-initial-rank-heartbeat-timeout=120", "--ft-workload-check-interval=0.5")
_WARM, _OFF = "--ft-preload=torch,torch._dynamo", "--ft-warm=off"
_WRAPPED = (_WARM, "--restart-policy=min-healthy")


def killed(trial):
    """SIGKILL of a rank, workers executed."""
    return _fault(trial, "crash", _OFF)


def killed_warm(trial):
    """SIGKILL of a rank, workers forked."""
    found = _fault(trial, "crash", _WARM)
    if not all(found["forked"]):
        raise Failed(f"workers were not forked: {found}")
    return found


def hung(trial):
    """A rank that no longer beats (timeout 5 s)."""
    return _fault(trial, "hang", _WARM, *_HANG)


def template(trial):
    """CUDA in the workers, and nothing of it in their template."""
    with trial.job("crash", _WARM) as job:
        pids = {one["pid"] for one in job.await_words("step", trial.ranks, cycle=0)}
        until_s = time.monotonic() + _BOUND_S
        scripts = _of_the_script(job)
        while len(scripts - pids) <= trial.ranks and time.monotonic() < until_s:  # a standby for each rank
            time.sleep(_POLL_S)
            scripts = _of_the_script(job)
        opened = {pid: _devices(pid) for pid in scripts}
    if not scripts - pids:
        raise Failed(f"no template beside the workers {pids}")
    if trial.gpus and not all(opened[pid] for pid in pids):
        raise Failed("a worker has no GPU open")
    if any(opened[pid] for pid in scripts - pids):
        raise Failed(f"a template or standby has GPUs open: {opened}")
    return {"template and standbys": len(scripts - pids), "devices open in them": 0}


def _of_the_script(job):
    """Its workers, their template and standbys."""
    found = set()
    for pid in children(job.pid):
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if any(name in command for name in (WORKER, *WAITING)):
                found.add(pid)
    return found


def _devices(pid):
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(fd)]
    return sum(link.startswith("/dev/nvidia") for link in links)


def in_process(trial):
    """inprocess.Wrapper: exception, soft timeout (sleep), hard timeout (stop, then the next cycle); until all go on."""
    found: dict[str, Any] = {}
    for fault, where in {"exception": {"iteration": 1}, "sleep": {"iteration": 1}, "stop": {"cycle": 1}}.items():
        with trial.job(f"wrapped {fault}", *_WRAPPED) as job:
            since_s = job.await_words("faulty", 1)[0]["at_s"]
            again = job.await_words("entered", trial.ranks, **where)
            found[fault] = f"{max(one['at_s'] for one in again) - since_s:.2f} s"
    return found


def pairs(trial):
    """In-process restart with process groups of two ranks on their own GPUs (NCCL P2P)."""
    trial.needs_gpus(2, "NCCL between GPUs")
    with trial.job("wrapped exception", *_WRAPPED) as job:
        done = job.await_words("returned", trial.ranks, iteration=1)
    return {"ranks": len(done)}


def flight_recorder(trial):
    """A hang leaves what torch's flight recorder knows in hang.json."""
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
    with trial.job("hang", _WARM, *_HANG) as job:
        job.await_words("faulty", 1)
        job.await_words("step", trial.ranks, cycle=1)
        (path,) = job.logs.glob("*/r0/cycle_0/hang.json")
        report = json.loads(path.read_text())
    recorded = [one["rank"] for one in report["ranks"] if one["collectives"]]
    if trial.gpus > 1 and len(recorded) < trial.ranks - 1:
        raise Failed(f"only ranks {recorded} have a record of their collectives")
    return {"ranks with a record": recorded, "culprits": report["culprits"], "why": report["why"]}


ROWS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "nvml": facts, "checks": checks, "nproc-gpu": ranks_by_gpu, "numa": numa, "killed": killed,
    "killed-warm": killed_warm, "hung": hung, "template": template, "in-process": in_process, "p2p": pairs,
    "flight-recorder": flight_recorder,
}  # fmt: skip


@contextmanager
def nvml():
    """How many real GPUs there are; without one, NVML's stand-in answers the rows about NVML."""
    try:
        count = gpus.seen()
    except (Absent, HardwareError):
        count = 0
    if "NVML_STANDIN" in os.environ:
        yield 0
        return
    if count:
        yield count
        return
    with tempfile.TemporaryDirectory(prefix="gpu-trial-nvml-") as name:
        stand_in = StandIn(built(Path(name)), Path(name) / "state")
        stand_in.say("count 2", "used 100")
        env = {**os.environ, **stand_in.env}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode)


def measure(trial, name):
    """One row."""
    began_s = time.monotonic()
    try:
        value, verdict = ROWS[name](trial), "ok"
    except Untried as why:
        value, verdict = {"why": str(why)}, "untried"
    except Exception as error:  # a row never stops the others
        value, verdict = {"why": f"{type(error).__name__}: {error}"}, "failed"
    return {"row": name, "what": (ROWS[name].__doc__ or "").strip(), "verdict": verdict, "value": value,
            "took_s": round(time.monotonic() - began_s, 1)}  # fmt: skip


def main():
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(prog="scripts/dev/gpu-trial", description="A trial on the GPUs of this machine.")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="NAME,...", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--output", default="gpu-trial.json", metavar="FILE", help="[gpu-trial.json]")
    args = parser.parse_args()
    names = args.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"no row is called {unknown[0]}; there are {', '.join(ROWS)}")
    with nvml() as count, tempfile.TemporaryDirectory(prefix="gpu-trial-") as directory:
        print(f"{count} GPUs" + (" (NVML is a stand-in, ranks use gloo)" if not count else ""), flush=True)
        trial, rows = Trial(Path(directory), count), []
        for name in names:
            rows.append(measure(trial, name))
            told = "; ".join(f"{key} {value}" for key, value in rows[-1]["value"].items())
            print(f"{name:16} {rows[-1]['verdict']:8} {rows[-1]['took_s']:6.1f} s  {told[:600]}", flush=True)
    result = {"node": os.uname().nodename, "gpus": count, "rows": rows}
    Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row["verdict"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
