"""`nvrx health serve` in a directory of its own, and a client for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx_slurm.health.checks.node_service import METHOD
from nvrx_slurm.health.service import nvhcd_pb2 as pb

BOUND_S = 60.0
NVRX_ARGS = ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"]
WELL = '{"fail_count": 0, "failed_checks": []}'


class Daemon:
    """A daemon, its files in a directory with a short name."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="nvhcd-"))
        self.dir.chmod(0o755)
        self.socket = self.dir / "s"
        self.settings: dict[str, Any] = {"socket_path": str(self.socket), "log_level": "debug", "timeout": 60}
        self.args: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.channel = grpc.insecure_channel(f"unix:{self.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self.ask = self.channel.unary_unary(
            METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )

    def script(self, body: str) -> Path:
        """The health check script: `body` of a shell script that runs in the directory."""
        file = self.dir / "check.sh"
        file.write_text(f"#!/bin/bash\ncd {self.dir}\n{body}\n")
        file.chmod(0o755)
        self.settings["healthcheck_path"] = str(file)
        return file

    def launch(self) -> subprocess.Popen[str]:
        file = self.dir / "nvhcd.yaml"
        file.write_text(json.dumps(self.settings))
        argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "serve", "--config", str(file), *self.args]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.process

    def start(self, body: str | None = None) -> Daemon:
        """Returns when it listens."""
        if body is not None:
            self.script(body)
        self.launch()
        self.wait_for("listening on")
        return self

    def wait_for(self, words: str, times: int = 1) -> None:
        """Read its log until so many lines have these words."""
        assert self.process is not None and self.process.stderr is not None
        lines = []
        while times:
            line = self.process.stderr.readline()  # pytest-timeout bounds it
            assert line, f"it ended: {lines}"
            lines.append(line)
            times -= words in line

    def refused(self) -> str:
        """The one sentence of a daemon that does not start."""
        out, err = self.launch().communicate(timeout=BOUND_S)
        assert self.process is not None
        assert (self.process.returncode, out) == (2, "") and err.count("\n") == 1, err
        return err

    def answer(self, *args: str) -> Any:
        return self.ask(pb.HealthCheckRequest(args=args), timeout=BOUND_S)

    def error(self, *args: str) -> tuple[str, str]:
        """(status, sentence) of a call that fails."""
        with pytest.raises(grpc.RpcError) as error:
            self.answer(*args)
        return error.value.code().name, error.value.details()

    @contextmanager
    def connected(self, count: int) -> Iterator[list[Any]]:
        """So many calls to ask with, each by a connection of its own."""
        with ExitStack() as stack:
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [grpc.insecure_channel(f"unix:{self.socket}", options) for _ in range(count)]
            yield [
                stack.enter_context(channel).unary_unary(
                    METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
                )
                for channel in channels
            ]

    def lines(self, name: str) -> list[str]:
        file = self.dir / name
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        """However it ended."""
        self.channel.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=BOUND_S)
        shutil.rmtree(self.dir)

    def stop(self) -> str:
        """The rest of its log."""
        assert self.process is not None
        self.process.terminate()
        out, err = self.process.communicate(timeout=BOUND_S)
        assert (self.process.returncode, out) == (0, "")
        assert sorted(path.name for path in self.dir.glob("s*")) == [], "its socket is gone"
        return err
