"""The exception hook: an uncaught exception ends the process at once, and nothing else does."""

import subprocess
import sys

import pytest
from monitor_harness import ROOT
from waits import WAIT_S

from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.testing import standalone_monitor

pytestmark = pytest.mark.process


HOOK = f"""
import atexit, os, sys, threading
sys.path.insert(0, {ROOT!r})
from nvrx_slurm.monitor import exception_hook
exception_hook.install()
thread = threading.Thread(target=lambda: 1 / 0)  # not a failure of the process
thread.start()
thread.join()
pid = os.fork()
if not pid:
    atexit.register(print, "child at exit")
    raise ValueError("child")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
WAITS = """
never = threading.Event()
threading.Thread(target=never.wait).start()
atexit.register(never.wait)
class Collective:
    def __del__(self):
        never.wait()
hold = Collective()
sys.stdout.write("a line without its end")  # in a buffer: stdout is a pipe
1 / 0
"""
OWN_HOOK = """
def theirs(kind, error, traceback):
    print("theirs", error)
    raise RuntimeError("in the hook")
sys.excepthook = theirs
exception_hook.install()
sys.stderr.close()
threading.Thread(target=threading.Event().wait).start()
raise ValueError("x")
"""


@pytest.mark.parametrize(
    "code, status, out",
    [(WAITS, 1, "a line without its end"), (OWN_HOOK, 1, "theirs x\n"), ("sys.exit(7)", 7, "")],
    ids=["nothing is waited for", "the script's own hook", "an exit is not a failure"],
)
def test_the_exception_hook(code, status, out):
    command = [sys.executable, "-c", HOOK + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (status, "child at exit\n1\n" + out)
    assert "ZeroDivisionError" in done.stderr and "ValueError: child" in done.stderr


@pytest.mark.parametrize("wanted", [True, False])
def test_init_installs_the_hook_if_the_launcher_says_so(monkeypatch, wanted):
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", before)  # restored in the end
    client = RankMonitorClient()
    with standalone_monitor(install_exception_hook=wanted):
        client.init_workload_monitoring()
        client.shutdown_workload_monitoring()
    assert client.cfg.install_exception_hook is wanted and (sys.excepthook is not before) is wanted
