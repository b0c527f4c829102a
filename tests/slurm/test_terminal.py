"""A person at a terminal: the only rank of a job reads it, and each run of a shell has a directory of its own."""

import os
import pty
import select
import time

import pytest
from waits import WAIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d")]

ASKS = 'print("it is", input("name? "))\n'
OF_FOUR = ["srun", "-N4", "-n4", "--pty", "nvrx-run", "worker.py"]
# Rank 0, which alone has the terminal, says when all can save.
SAVES = """
def save(signum, frame):
    mark("saved")
    sys.exit()
signal.signal(signal.SIGINT, save)
ready = os.environ["TEST_JOB"] + "/ready"
try:
    os.mkfifo(ready)
except FileExistsError:
    pass
fd = os.open(ready, os.O_RDWR if RANK == 0 else os.O_WRONLY)  # waits for rank 0
if RANK == 0:
    for _ in range(3):
        os.read(fd, 1)
    print("all are ready", flush=True)
else:
    os.write(fd, b".")
signal.pause()
"""


def typed(jobs, job, argv, prompt, line, code=0):
    """What a terminal shows of a command, in which `line` is typed once it has shown `prompt`, and which ends so."""
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
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code and answered, shown.decode()
    return shown.decode()


@pytest.mark.parametrize("command", ["nvrx-run --standalone", "salloc --nodes=1 nvrx-run"])
def test_the_only_rank_reads_the_terminal(varied, command):
    job = varied.new(ASKS)
    shown = typed(varied, job, [*command.split(), "worker.py"], "name? ", "alice")
    assert "it is alice" in shown and "cycle 0" in shown


def test_several_nodes_train_at_a_terminal(varied):
    job = varied.new("mark('trained')\n")
    shown = typed(varied, job, OF_FOUR, "cycle 0", "")
    assert "job ends with code 0" in shown
    assert [mark.rank for mark in job.marks("trained")] == [0, 1, 2, 3]


def test_ctrl_c_at_the_terminal_lets_the_ranks_of_all_nodes_save(varied):
    job = varied.new(SAVES)
    shown = typed(varied, job, OF_FOUR, "all are ready", "\x03", 130)
    assert "job ends with code 130" in shown
    assert [mark.rank for mark in job.marks("saved")] == [0, 1, 2, 3]


def test_without_a_terminal_the_advice_says_why_there_is_no_input(varied):
    job = varied.submit(ASKS, "", 1)
    job.ends("FAILED", 1)
    assert "no-input" in str(job.result()["first_cause"]["finding"]), job.result()


def test_each_run_of_a_shell_has_a_directory_of_its_own(varied):
    """Also side by side, and of a step with several tasks whose script starts nvrx-run twice."""
    job = varied.new("mark('ran')\n")
    side_by_side = "echo 'go? '; read x; nvrx-run worker.py & nvrx-run worker.py; wait"
    shown = typed(varied, job, ["srun", "--nodes=1", "--pty", "bash", "-c", side_by_side], "go? ", "go")
    assert shown.count("job ends with code 0") == 2
    twice = "nvrx-run worker.py; nvrx-run worker.py"
    varied.srun(job, "--nodes=2", "--ntasks-per-node=1", "--no-kill", "bash", "-c", twice)
    runs = sorted(path.name for path in job.directory.glob("nvrx_logs/[0-9]*/r*"))
    assert runs == ["r0", "r0", "r0_2", "r0_2"] and len(job.marks("ran")) == 2 + 4
