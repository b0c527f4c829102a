"""`nvrx health serve`: whose socket it is, who may connect, and settings that are wrong."""

from __future__ import annotations

import grp
import os
import select
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvhcd_harness import BOUND_S, Daemon

from nvrx_slurm.config import nvhcd as config

# --- the socket -------------------------------------------------------------------------------------------------------


def test_everybody_may_ask_unless_there_is_a_group(daemon: Daemon) -> None:
    daemon.start("")
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o666
    daemon.stop()
    daemon.settings["group"] = grp.getgrgid(os.getegid()).gr_name
    daemon.start()
    found = daemon.socket.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getegid())
    if os.geteuid() == 0:
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({str(daemon.socket)!r})"
        stranger = {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", connect], stderr=subprocess.PIPE, text=True, check=False, **stranger
        )
        assert "PermissionError" in done.stderr, "the kernel looked at its credentials"
    daemon.stop()


def test_a_socket_somebody_listens_on_is_theirs(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen(0)
        number = daemon.socket.stat().st_ino
        assert "somebody listens there already" in daemon.refused()
        assert daemon.socket.stat().st_ino == number, "another program's socket is left alone"
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for waiting in (one, two):  # a peer that takes no connection listens, too
                waiting.setblocking(False)
                waiting.connect_ex(str(daemon.socket))
            assert "somebody listens there already" in daemon.refused()


@pytest.mark.parametrize("what", ["a file", "a directory", "a link"])
def test_nothing_but_a_socket_is_replaced(daemon: Daemon, what: str) -> None:
    target = daemon.dir / "target"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(target))
    {"a file": daemon.socket.touch, "a directory": daemon.socket.mkdir}.get(
        what, lambda: daemon.socket.symlink_to(target)
    )()
    before = daemon.socket.lstat()
    assert "is there already and no socket" in daemon.refused()
    assert daemon.socket.lstat() == before and target.is_socket()


@pytest.mark.parametrize("what", ["file", "directory", "link", "socket"])
def test_what_came_in_its_place_is_not_removed(daemon: Daemon, what: str) -> None:
    daemon.start("")
    aside = daemon.dir / "aside"
    daemon.socket.rename(aside)
    with socket.socket(socket.AF_UNIX) as other:
        {
            "file": daemon.socket.touch,
            "directory": daemon.socket.mkdir,
            "link": lambda: daemon.socket.symlink_to(aside),
            "socket": lambda: other.bind(str(daemon.socket)),
        }[what]()
        before = daemon.socket.lstat()
        assert daemon.process is not None
        daemon.process.terminate()
        _, err = daemon.process.communicate(timeout=BOUND_S)
        assert daemon.process.returncode == 0 and "Traceback" not in err
        assert daemon.socket.lstat() == before


def test_of_daemons_that_start_at_once_one_serves(daemon: Daemon) -> None:
    daemon.script("")
    processes = [daemon.launch() for _ in range(4)]
    poller = select.poll()
    pidfds = {os.pidfd_open(process.pid): process for process in processes}
    for fd in pidfds:
        poller.register(fd, select.POLLIN)
    while len(pidfds) > 1:
        for fd, _ in poller.poll(BOUND_S * 1000):
            poller.unregister(fd)
            os.close(fd)
            loser = pidfds.pop(fd)
            _, err = loser.communicate(timeout=BOUND_S)
            assert loser.returncode == 2 and ("listens there already" in err or "just starting" in err), err
    ((fd, daemon.process),) = pidfds.items()
    os.close(fd)
    daemon.wait_for("listening on")
    assert daemon.answer().success
    daemon.stop()


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"socket_pth": "/run/s"}, "'socket_pth' is not a key; did you mean socket_path?"),
        ({"zzz": 1}, "'zzz' is not a key; known: socket_path, healthcheck_path, log_level, timeout, group, users"),
        ({"socket_path": "s"}, "socket_path must be an absolute path"),
        ({"socket_path": "/nowhere/s"}, "/nowhere"),
        ({"socket_path": "/tmp/" + "s" * 103}, "must be at most 107 bytes long"),
        ({"healthcheck_path": "check.sh"}, "healthcheck_path must be an absolute path"),
        ({"healthcheck_path": "/no/check.sh"}, "/no/check.sh cannot be used: No such file or directory"),
        ({"healthcheck_path": "/etc/passwd"}, "/etc/passwd cannot be executed"),
        ({"healthcheck_path": "/tmp"}, "/tmp cannot be executed"),
        ({"log_level": "loud"}, "log_level must be debug or info"),
        ({"timeout": 0}, "timeout must be a number of seconds > 0"),
        ({"timeout": True}, "timeout must be a number of seconds > 0"),
        ({"timeout": "1h"}, "timeout must be a number of seconds > 0"),
        ({"group": "no-such-group"}, "there is no group 'no-such-group'"),
        ({"users": ["root", "no-such-user"]}, "there is no user 'no-such-user'"),
        ({"users": "root"}, "users must be a list of users"),
        ({"users": [True]}, "users must be a list of users"),
        ({"users": [-1]}, "users must be a list of users"),
        ({"user": ["root"]}, "'user' is not a key; did you mean users?"),
    ],
)
def test_settings_that_are_wrong_are_told(daemon: Daemon, settings: dict[str, Any], said: str) -> None:
    daemon.settings |= settings
    assert said in daemon.refused()
    assert list(daemon.dir.glob("s*")) == []


@pytest.mark.parametrize(
    "text", ["- a", "a: [", "text", "\tb: 1", "timeout: 1\ntimeout: 2", "\0\1", "\udcff: 1", "FIFO", "DIR"]
)
def test_a_file_that_is_none_is_told(daemon: Daemon, text: str) -> None:
    file = daemon.dir / "f.yaml"
    if text == "FIFO":
        os.mkfifo(file)
    elif text == "DIR":
        file.mkdir()
    else:
        file.write_text(text, errors="surrogateescape")
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "serve", "--config", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and str(file) in done.stderr


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("# nothing\nhealthcheck_path:\n")
    assert config.load(str(tmp_path / "f.yaml")) == ("/var/run/nvhcd.sock", None, "info", 120.0, None, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="root only distrusts what others can write to")
def test_root_runs_nothing_that_others_can_change(daemon: Daemon) -> None:
    script = daemon.script("echo ran >> log")
    script.chmod(0o777)
    assert "not trusted by root" in daemon.refused()
    script.chmod(0o755)
    daemon.start()
    script.chmod(0o775)
    code, details = daemon.error()
    assert (code, daemon.lines("log")) == ("FAILED_PRECONDITION", []) and "not trusted by root" in details
    script.chmod(0o755)
    assert daemon.answer().success and daemon.lines("log") == ["ran"]
    daemon.stop()
    daemon.dir.chmod(0o777)
    assert "not trusted by root" in daemon.refused()
