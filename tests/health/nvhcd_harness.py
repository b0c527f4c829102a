"""`nvrx health serve` in a folder of its own, and a client for it."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from waits import WAIT_S

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # other tests fork; their children make no calls
import grpc  # noqa: E402

from nvrx_slurm.health.checks.node_service import METHOD  # noqa: E402
from nvrx_slurm.health.service import nvhcd_pb2 as pb  # noqa: E402

WORDS = ["--no-slurm", "--group", "prolog", "gpu", "a", "b", "c", "next", "a" * 256]  # which a call may have
WELL = '{"fail_count": 0, "failed_checks": []}'


class Daemon:
    """A daemon, its files in a folder with a short name. Its script may be replaced between runs."""

    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="nvhcd-"))
        self.dir.chmod(0o755)
        self.socket = self.dir / "s"
        self.settings = {"socket_path": str(self.socket), "log_level": "debug", "timeout": 60}
        self.settings["args"] = WORDS
        self.args = []
        self.process = None
        self.channel = grpc.insecure_channel(f"unix:{self.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self.ask = self.channel.unary_unary(
            METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )
        self._log = []

    def script(self, body):
        """The health check script: `body` of a shell script that runs in the folder, without files of earlier ones."""
        for name in ("log", "args", "go", "ready", "own", "pid"):
            (self.dir / name).unlink(missing_ok=True)
        file = self.dir / "check.sh"
        file.write_text(f"#!/bin/bash\ncd {self.dir}\n{body}\n")
        file.chmod(0o755)
        self.settings["healthcheck_path"] = str(file)
        return file

    def fifo(self, name):
        os.mkfifo(self.dir / name)
        return self.dir / name

    def launch(self):
        file = self.dir / "nvhcd.yaml"
        file.write_text(json.dumps(self.settings))
        argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "serve", "--config", str(file), *self.args]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, bufsize=1)
        self._log = []
        return self.process

    def start(self, body=None):
        """Returns when it listens."""
        if body is not None:
            self.script(body)
        self.launch()
        self.wait_for("listening on")
        return self

    def wait_for(self, words):
        """Wait until a further line of its log has these words."""
        line = ""
        while words not in line:
            assert select.select([self.process.stderr], [], [], WAIT_S)[0], f"{words!r} is not in its log: {self._log}"
            line = self.process.stderr.readline()
            assert line, f"it ended: {self._log}"
            self._log.append(line)

    def answer(self, *args):
        return self.ask(pb.HealthCheckRequest(args=args), timeout=WAIT_S)

    def error(self, *args):
        """(status, sentence) of a call that fails."""
        with pytest.raises(grpc.RpcError) as error:
            self.answer(*args)
        return error.value.code().name, error.value.details()

    def lines(self, name):
        file = self.dir / name
        return file.read_text().splitlines() if file.exists() else []

    def close(self):
        self.channel.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        shutil.rmtree(self.dir)

    def stop(self):
        """By SIGTERM; it leaves no socket."""
        self.process.terminate()
        _, log = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0 and not self.socket.exists() and "Traceback" not in log, log


def running():
    """A daemon for several tests."""
    daemon = Daemon()
    yield daemon.start("")
    daemon.stop()
    daemon.close()
