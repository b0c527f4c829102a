"""The exception hook (--ft-install-exception-hook): a rank that fails is gone at once, and its traceback is not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from monitor_harness import ROOT, WAIT_S

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"
HEAD = f"""
import atexit, os, sys, threading
sys.path.insert(0, {ROOT!r})
from nvrx_slurm.monitor import exception_hook
never = threading.Event()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """The code's process; subprocess.TimeoutExpired if it does not end by itself."""
    command = [sys.executable, "-c", HEAD + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_nothing_is_waited_for_after_the_traceback():
    done = run(
        """
        exception_hook.install()
        threading.Thread(target=never.wait).start()
        atexit.register(never.wait)
        class Collective:
            def __del__(self):
                never.wait()
        hold = Collective()
        sys.stdout.write("a line without its end")  # in a buffer: stdout is a pipe
        1 / 0
        """
    )
    assert done.returncode == 1
    assert done.stdout == "a line without its end"
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_without_it_python_would_wait():
    """What the test above is worth."""
    done = run(
        """
        threading.Thread(target=lambda: never.wait(0.5) or print("waited")).start()
        1 / 0
        """
    )
    assert (done.returncode, done.stdout) == (1, "waited\n")


def test_the_hook_of_the_script_is_kept_and_may_fail():
    done = run(
        """
        def theirs(kind, error, traceback):
            print("theirs", error)
            raise RuntimeError("in the hook")
        sys.excepthook = theirs
        exception_hook.install()
        exception_hook.install()  # the second one does nothing
        sys.stderr.close()
        threading.Thread(target=never.wait).start()
        raise ValueError("x")
        """
    )
    assert (done.returncode, done.stdout) == (1, "theirs x\n")


def test_ends_that_are_no_failure_stay_as_they_are():
    done = run(
        """
        exception_hook.install()
        thread = threading.Thread(target=lambda: 1 / 0)  # the end of a thread is not the end of the rank
        thread.start()
        thread.join()
        atexit.register(print, "at exit")
        sys.exit(7)
        """
    )
    assert (done.returncode, done.stdout) == (7, "at exit\n")


def test_a_forked_child_ends_as_ever():
    done = run(
        """
        exception_hook.install()
        pid = os.fork()
        if not pid:
            atexit.register(print, "child at exit")
            raise ValueError("child")
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert (done.returncode, done.stdout) == (0, "child at exit\n1\n")
    assert done.stderr.endswith("ValueError: child\n")


def test_init_installs_it_if_the_launcher_says_so():
    for wanted in (True, False):
        done = run(
            f"""
            from nvrx_slurm.fault_tolerance import RankMonitorClient
            from nvrx_slurm.testing import standalone_monitor
            os.environ.pop({SOCKET!r}, None)
            before = sys.excepthook
            with standalone_monitor(install_exception_hook={wanted}):
                client = RankMonitorClient()
                for _ in range(2):
                    client.init_workload_monitoring()
                    client.shutdown_workload_monitoring()
            print(client.cfg.install_exception_hook, sys.excepthook is not before)
            """
        )
        assert (done.stdout, done.returncode) == (f"{wanted} {wanted}\n", 0), done.stderr
