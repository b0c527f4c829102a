"""A DGX-like node as a tree of files, copied on write, and checks run on it."""

import ctypes
import functools
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import dgx
import pytest
from waits import WAIT_S

from nvrx_slurm.health import registry
from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.outcome import from_json
from nvrx_slurm.health.runner import examine

CHECKS = registry.built_in()
EXPECTED = registry.defaults(CHECKS.values())
F, U, N, P = Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.PASS
LUSTRE = "/sys/fs/lustre/health_check"


@functools.cache
def _template(directory):
    """The healthy tree, built once per worker beside the tests' own directories."""
    root = tempfile.mkdtemp(prefix="dgx-", dir=directory)
    dgx.build(Path(root))
    Path(root, f"run/user/{os.geteuid()}").mkdir(parents=True)
    Path(root, "tmp").mkdir(exist_ok=True)
    return root


class Node:
    """A recorded node whose files a test may break, by `node / path` and `write` only: other files are shared."""

    def __init__(self, root, empty=False):
        self.recorded = dgx
        self.root = root
        if empty:
            (root / f"run/user/{os.geteuid()}").mkdir(parents=True)
        else:
            shutil.copytree(_template(str(root.parents[1])), root, symlinks=True, copy_function=os.link)

    def __truediv__(self, path):
        """The path of a file or directory; a shared file becomes this node's own."""
        place = self.root / path.lstrip("/")
        if place.is_file() and place.stat().st_nlink > 1:
            self._replace(place.resolve(), place.read_bytes())
        return place

    def write(self, path, text):
        """Replace one file, at once for its readers."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        self._replace(place.resolve(), text.encode())

    def _replace(self, place, data):
        new = place.with_name(f".new-{place.name}")
        new.write_bytes(data)
        new.replace(place)

    def edit(self, path, old, new):
        """Replace `old`, which must be there, in one file."""
        text = (self / path).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def add(self, path, text):
        self.write(path, (self / path).read_text() + text)

    def remove(self, path):
        place = self.root / path.lstrip("/")
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()

    def found(self, check, env=None, /, **expect):
        return examine(CHECKS[check], NodeView(str(self.root), env or {}), EXPECTED | expect)

    def learned(self, check):
        """The settings that one check learns."""
        found = {}
        examine(CHECKS[check], NodeView(str(self.root), {}), EXPECTED, found)
        return found

    def start(self, *args, env=None):
        """`python -I -m nvrx_slurm.health` on this node, as a hook or the agent starts it; `env` is added."""
        argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--sysroot", str(self.root), *args]
        environ = {**os.environ, **(env or {})}
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)

    def program(self, *args, env=None):
        """(exit code, report) of it."""
        process = self.start(*args, env=env)
        out, err = process.communicate(timeout=WAIT_S)
        assert out, err
        return process.returncode, from_json(out)

    def site(self, **document):
        """Write a site file (YAML is a superset of JSON); its path."""
        file = self.root.parent / f"{self.root.name}.yaml"
        file.write_text(json.dumps(document))
        return str(file)


class HungMount:
    """A FUSE file system without a server, else a skip: a process that looks into it blocks in the kernel."""

    def __init__(self, target):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._target = os.fsencode(target)
        try:
            self._fd = os.open("/dev/fuse", os.O_RDWR)
        except OSError as error:
            pytest.skip(f"no FUSE mount can be made here: {error}")
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0"
        if self._libc.mount(b"hung", self._target, b"fuse", 0, options.encode()) != 0:
            os.close(self._fd)
            pytest.skip(f"no FUSE mount can be made here: {os.strerror(ctypes.get_errno())}")

    def close(self):
        assert self._libc.umount2(self._target, 2) == 0
        os.close(self._fd)

    def take(self):
        """Take a question and never answer: not even SIGKILL ends the process that asked."""
        while (question := os.read(self._fd, 1 << 20))[4:8] == b"\x1a\0\0\0":  # FUSE_INIT has to be answered
            header, version = struct.unpack_from("<IIQ", question), struct.unpack_from("<II", question, 40)
            answer = struct.pack("<IIIIHHIIHHI28x", *version, 0, 0, 0, 0, 4096, 0, 0, 0, 0)
            os.write(self._fd, struct.pack("<IiQ", 16 + len(answer), 0, header[2]) + answer)


def ended(pid):
    """Whether a process that is not our child ends within the bound."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(WAIT_S * 1000))
    finally:
        os.close(fd)
