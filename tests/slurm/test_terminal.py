"""A person at a terminal: the only rank of a job reads it, and each run of a shell has a directory of its own."""

from __future__ import annotations

import os
import pty
import select
import time

import pytest
from nvrx_job import WAIT_S, Job, Jobs

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d")]

ASKS = 'print("it is", input("name? "))\n'


def typed(jobs: Jobs, job: Job, argv: list[str], prompt: str, line: str) -> str:
    """What a terminal shows of a command, in which `line` is typed once it has shown `prompt`."""
    pid, screen = pty.fork()
    if pid == 0:
        clean = {k: v for k, v in os.environ.items() if k != "NVRX_TOKEN"}
        own = {"PATH": jobs._path(), "TEST_JOB": str(job.directory), "TMPDIR": str(job.directory)}
        os.chdir(job.directory)
        os.execvpe(argv[0], argv, {**clean, **jobs.cluster.env(), **own})
    shown, until_s = b"", time.monotonic() + WAIT_S
    answered = False
    while select.select([screen], [], [], max(0.0, until_s - time.monotonic()))[0]:
        try:
            shown += os.read(screen, 4096)
        except OSError:  # all have closed it
            break
        if prompt.encode() in shown and not answered:
            os.write(screen, f"{line}\n".encode())
            answered = True
    os.close(screen)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and answered, shown.decode()
    return shown.decode()


@pytest.mark.parametrize("command", ["nvrx-run --standalone", "salloc --nodes=1 nvrx-run"])
def test_the_only_rank_reads_the_terminal(varied: Jobs, command: str):
    job = varied.new(ASKS)
    shown = typed(varied, job, [*command.split(), "worker.py"], "name? ", "alice")
    assert "it is alice" in shown and "cycle 0" in shown


def test_without_a_terminal_the_advice_says_why_there_is_no_input(varied: Jobs):
    job = varied.submit(ASKS, "", 1)
    job.ends("FAILED", 1)
    assert "no-input" in str(job.result()["first_cause"]["finding"]), job.result()
