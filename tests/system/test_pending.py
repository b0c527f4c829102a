"""Whether a handler of a signal has yet to run, in another process with the same Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.system.pending import is_pending

pytestmark = pytest.mark.fast


REPO = Path(__file__).parents[2]
# It waits in C for a byte; libc's read goes on after a signal.
WAITS = """
import ctypes, os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"handled"))
signal.siginterrupt(signal.SIGTERM, False)
os.write(1, b"waits")
ctypes.CDLL(None).read(0, ctypes.create_string_buffer(1), 1)
os.read(0, 1)
"""
# Prints what was seen before the signal, while its handler could not begin, and after that.
LOOKS = f"""
import json, subprocess, sys, time
sys.path.insert(0, {str(REPO)!r})
from nvrx_slurm.system.pending import is_pending
pipe, facts = subprocess.PIPE, []
def until(condition):
    deadline_s = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
with subprocess.Popen([sys.executable, "-c", {WAITS!r}], stdin=pipe, stdout=pipe, bufsize=0) as process:
    facts.append(process.stdout.read(5).decode())
    until(lambda: open(f"/proc/{{process.pid}}/syscall").read().split()[:2][-1] == "0x0")  # descriptor 0
    facts.append(is_pending(process.pid, 15))
    process.terminate()
    until(lambda: is_pending(process.pid, 15))
    facts.append(is_pending(process.pid, 15))
    process.stdin.write(b"x")
    facts.append(process.stdout.read(7).decode())
    facts.append(is_pending(process.pid, 15))
    process.kill()
print(json.dumps(facts))
"""
VERSIONS = {path.parts[-3]: path for path in Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python")}


@pytest.mark.parametrize("version", ["", *(pytest.param(name, marks=pytest.mark.matrix) for name in sorted(VERSIONS))])
def test_a_handler_is_pending_until_the_main_thread_is_back_in_python(version):
    python = VERSIONS[version] if version else sys.executable
    done = subprocess.run([python, "-c", LOOKS], stdout=subprocess.PIPE, timeout=60, check=True)
    assert json.loads(done.stdout) == ["waits", False, True, "handled", False]


def test_another_program_has_no_handlers_of_python():
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert not is_pending(process.pid, 15)
        process.kill()


def test_a_process_that_has_ended_tells_nothing():
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_pending(process.pid, 15)
