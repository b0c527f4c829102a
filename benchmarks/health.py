"""Health checks on the recorded node with 8 GPUs: prolog, preflight, a mount that hangs.

The hooks are those of prolog/, installed for root in a directory of their own; what stands in for NVML is compiled.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.harness import Failure

REPO = Path(__file__).resolve().parents[1]
BOUND_S = 60.0
_DEADLINE_S = 2.0  # of the checks beside a mount that hangs


def _loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Node:
    """The recorded node below `root`, with NVML's stand-in, and the prolog as root installs it."""

    def __init__(self, root):
        self.root = root
        self.tree = root / "node"
        recorded = _loaded(REPO / "tests/lib/dgx.py")
        recorded.build(self.tree)
        standin = _loaded(REPO / "tests/lib/standin.py")
        try:
            nvml = standin.StandIn(standin.built(root), root / "nvml")
        except LookupError as error:
            raise Failure(str(error)) from None
        buses = [f"bus.{index} 0x{address[5:7]}" for index, address in enumerate(recorded.GPUS)]
        nvml.say("count 8", "links 18", "field208 0", "field215 0", *buses)
        self.env = {**os.environ, **nvml.env}
        self._install(nvml.env)

    def _install(self, env):
        """PYTHON is a script that sets NVML's stand-in, because hook.sh clears the environment."""
        shutil.copytree(REPO / "prolog", self.root / "hooks")
        words = " ".join(f"{name}='{value}'" for name, value in env.items())
        python = self.root / "python"
        python.write_text(f'#!/bin/sh\nexec env -u PYTHONHOME {words} {sys.executable} "$@"\n')
        python.chmod(0o755)
        settings = {"PYTHON": python, "PACKAGE": REPO, "SYSROOT": self.tree, "LOG": self.root / "log"}
        conf = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.root / "hooks/hooks.conf").write_text(conf)

    def cold(self):
        """Nothing is known from an earlier run."""
        shutil.rmtree(self.tree / "run/nvrx-health", ignore_errors=True)
        (self.root / "log").unlink(missing_ok=True)

    def prolog(self):
        """Start it as slurmd does."""
        env = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "SLURM_JOB_UID": "65534"}
        return subprocess.Popen([str(self.root / "hooks/prolog")], env=env, stdin=subprocess.DEVNULL)

    def log(self):
        """What hooks said."""
        file = self.root / "log"
        return file.read_text() if file.exists() else ""


@contextlib.contextmanager
def _node():
    if os.geteuid() != 0:
        raise Failure("hooks run as root only")
    root = Path(tempfile.mkdtemp(prefix="nb-health-"))
    try:
        yield Node(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _took(start):
    started_s = time.monotonic()
    process = start()
    if process.wait(BOUND_S):
        raise Failure(f"{process.args!r} ended with {process.returncode}")
    return time.monotonic() - started_s


# --- prolog -----------------------------------------------------------------------------------------------------------


def _prolog(launchers, repeats):
    """A first run does not count."""
    took_s = []
    with _node() as node:
        for _ in range(repeats + 1):
            node.cold()
            took_s.append(_took(node.prolog))
            if ": pass: " not in node.log():
                raise Failure(f"the prolog did not pass: {node.log()}")
    return {"nvrx-run": took_s[1:]}


# --- a mount that hangs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hung(target):
    """A FUSE file system without a server."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"hung", os.fsencode(target), b"fuse", 0, options.encode()) != 0:
        os.close(fd)
        raise Failure(f"no FUSE mount can be made here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(target), 2)
        os.close(fd)


def _hung_mount(launchers, repeats):
    """How much longer than its time for all checks the program takes."""
    over_s = []
    with _node() as node, _hung(node.tree / "home"):
        argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--when", "prolog", "--sysroot", str(node.tree)]
        argv += ["--deadline", str(_DEADLINE_S)]
        for _ in range(repeats):
            node.cold()
            started_s = time.monotonic()
            done = subprocess.run(argv, env=node.env, capture_output=True, timeout=BOUND_S)
            over_s.append(time.monotonic() - started_s - _DEADLINE_S)
            found = {f["check"]: f for f in json.loads(done.stdout)["findings"] if f["verdict"] == "unknown"}
            if list(found) != ["mounts"] or "/home did not answer" not in found["mounts"]["text"]:
                raise Failure(f"the mount is not named, or not alone: {found}")
    return {"nvrx-run": over_s}


# --- preflight ------------------------------------------------------------------------------------------------------


def _asked(node, recorded, repeats):
    """Milliseconds from a question to the check server to its answer, after the first one."""
    where = ["--sysroot", str(node.tree)] if recorded else []
    argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--serve", "--when", "preflight", *where]
    process = subprocess.Popen(argv, env=node.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    took_ms = []
    with process:
        for _ in range(4 * repeats + 1):
            started_s = time.monotonic()
            process.stdin.write(b"check\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], BOUND_S)[0] or not process.stdout.readline():
                raise Failure("the check server did not answer")
            took_ms.append((time.monotonic() - started_s) * 1000)
        process.stdin.close()
    return took_ms[1:]


def _preflight(recorded):
    def measure(launchers, repeats):
        with _node() as node:
            return {"nvrx-run": _asked(node, recorded, repeats)}

    return measure


FIGURES = [
    Figure("health-prolog", "prolog hook, healthy 8-GPU node", "s", 0.35, _prolog),
    Figure("health-hung", "one mount hung: time beyond the deadline", "s", 0.2, _hung_mount),
    Figure("health-preflight-here", "preflight: question to answer, this machine", "ms", 50.0, _preflight(False)),
    Figure("health-preflight", "preflight: question to answer, 8-GPU node", "ms", 50.0, _preflight(True)),
]
