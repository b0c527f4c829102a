"""Bad values of the flags of merged logs: one sentence that says where and what to do, exit code 2, nothing started."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_harness import Run

PREFIX = "--ft-per-cycle-applog-prefix"


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ([f"{PREFIX}=logs/train.log"], [PREFIX, "absolute", "/"]),
        ([f"{PREFIX}=/"], [PREFIX, "file"]),
        ([f"{PREFIX}=/logs/"], [PREFIX, "file"]),
        ([f"{PREFIX}=/logs/%q.log"], [PREFIX, "%j"]),
        ([f"{PREFIX}=/logs/a\nb.log"], [PREFIX, "path"]),
        ([f"{PREFIX}=/proc/no/train.log"], [PREFIX, "/proc/no"]),
        ([f"{PREFIX}=/dev/null/train.log"], [PREFIX, "/dev/null"]),
        ([f"{PREFIX}=/tmp"], [PREFIX, "/tmp"]),
        ([f"{PREFIX}=/tmp/x.log", "--ft-nvrx-logfile=/proc/no/nvrx.log"], ["--ft-nvrx-logfile", "/proc/no"]),
        ([f"{PREFIX}=/tmp/x.log", "--ft-nvrx-logfile=nvrx.log"], ["--ft-nvrx-logfile", "absolute"]),
        (["--ft-nvrx-logfile=/tmp/nvrx.log"], ["--ft-nvrx-logfile", PREFIX]),
        (["--ft-enable-log-server=maybe"], ["--ft-enable-log-server", "true or false"]),
        (["--ft-log-server-port=0"], ["--ft-log-server-port", "65471"]),
        (["--ft-log-server-grpc-port=7000"], ["--ft-log-server-grpc-port", PREFIX]),
        (["--ft-log-aggregator-count=65"], ["--ft-log-aggregator-count", "64"]),
        (["--ft-log-leaf-max-queue-chunks=-2"], ["--ft-log-leaf-max-queue-chunks", "-1"]),
        (["--ft-log-server-graceful-shutdown-timeout=-1"], ["--ft-log-server-graceful-shutdown-timeout", "0"]),
    ],
)
def test_bad_flags(nvrx_run: Run, words: list[str], tokens: list[str]) -> None:
    Path("train.py").write_text("raise SystemExit(77)")
    done = nvrx_run("--standalone", *words, "train.py")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done
    assert all(token in done.err for token in tokens), done.err
    assert not Path("nvrx_logs").exists() or not list(Path("nvrx_logs").rglob("rank_*"))
