"""What workers say and how it is shown; consoles and disks that misbehave; what is started and in which environment."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import REPO, Rig

# --- last words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_last_words_without_a_newline_are_in_the_file_and_on_the_console(rig: Rig, end: str) -> None:
    script = rig.script(f"os.write(1, b'first\\nlast out'); os.write(2, b'last err'); {end}")
    one = rig.run(script)
    assert one.wait() == 1
    assert rig.log(0, 0, "out") == "first\nlast out" and rig.log(0, 0, "err") == "last err"
    for line in ("[rank 0] first", "[rank 0] last out", "[rank 0] last err"):
        assert line in one.text.splitlines()


def test_much_output_arrives_whole_and_in_order(rig: Rig) -> None:
    script = rig.script("for n in range(20000): say(n, 'x' * 40)")
    one = rig.run(script, "--nproc-per-node=2")
    assert one.wait() == 0
    for rank in (0, 1):
        got = [line.split()[2] for line in one.text.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert got == [str(n) for n in range(20000)]


SHOUT = "say('out'); print('err', file=sys.stderr)"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ((), "0out 0err 1out 1err"),
        (("-r", "3"), ""),
        (("-r", "1"), "0err 1err"),
        (("--redirects", "0:3,1:2"), "1out"),
        (("-r", "3", "-t", "1"), "0out 1out"),
        (("-r", "3", "-t", "0:3"), "0out 0err"),
        (("-t", "3"), "0out 0err 1out 1err"),
        (("--local-ranks-filter", "1"), "1out 1err"),
        (("-r", "1", "--local_ranks_filter=0"), "0err"),
    ],
)
def test_redirects_tee_and_filter(rig: Rig, flags: tuple[str, ...], shown: str) -> None:
    """Everything is in the files whatever is shown."""
    one = rig.run(rig.script(SHOUT), "--nproc-per-node=2", *flags)
    assert one.wait() == 0
    got = {line[6] + line.split()[2] for line in one.text.splitlines() if line.startswith("[rank ")}
    assert got == set(shown.split())
    assert [rig.log(0, r, kind) for r in (0, 1) for kind in ("out", "err")] == ["out\n", "err\n"] * 2


def test_stdout_and_stderr_stay_apart(rig: Rig) -> None:
    one = rig.run(rig.script(SHOUT), split=True)
    assert one.wait() == 0
    assert one.text == "[rank 0] out\n"
    assert one.process.stderr is not None and b"[rank 0] err\n" in one.process.stderr.read()


# --- consoles -------------------------------------------------------------------------------------------------------


def test_closed_stdout_and_stderr_do_no_harm(rig: Rig) -> None:
    """The descriptors 1 and 2 must not become something else of ours that the console then writes to."""
    script = rig.script("for n in range(500): say('loud', n)")
    command = f"exec {sys.executable} -m nvrx_slurm.cli.run --log-dir={rig.logs} {script} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env=rig.env(), cwd=rig.dir, timeout=30, check=False)
    assert done.returncode == 0
    assert rig.log(0, 0, "out").count("loud") == 500
    events = list((rig.run_dir / "events").iterdir())
    assert len(events) == 2
    for path in events:
        for line in path.read_text().splitlines():
            json.loads(line)


def test_console_that_nobody_reads_stops_nothing(rig: Rig) -> None:
    """The pipe is full long before the workers are done; the job ends all the same, within the time for last words."""
    script = rig.script("for n in range(30000): say('x' * 80)")
    one = rig.run(script)
    fcntl.fcntl(one.process.stdout.fileno(), 1031, 4096)  # F_SETPIPE_SZ
    assert one.process.wait(30) == 0
    assert rig.log(0, 0, "out").count("\n") == 30000
    one.wait()


def test_console_whose_reader_has_gone_stops_nothing(rig: Rig) -> None:
    one = rig.run(rig.script("say('a'); preflight(); say('b')"))
    one.expect("a$")
    read_end = os.open(os.devnull, os.O_RDONLY)
    os.dup2(read_end, one.process.stdout.fileno())
    os.close(read_end)
    rig.open()
    assert one.process.wait(30) == 0
    assert rig.log(0, 0, "out") == "a\nb\n"
    one.wait()


# --- disks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "read-only"])
def test_log_directory_that_cannot_be_made_is_one_sentence(rig: Rig, kind: str) -> None:
    rig.logs = rig.dir / "afile" / "logs" if kind == "file" else Path("/proc/nvrx")
    (rig.dir / "afile").write_text("")
    one = rig.run(rig.script("forever()"))
    assert one.wait() == 2
    assert one.text.count("\n") == 1 and one.text.startswith("nvrx-run: the log directory /")
    assert "cannot be made" in one.text and "--log-dir" in one.text


@pytest.fixture
def small_disk(rig: Rig) -> Iterator[Path]:
    """A file system of 128 KiB."""
    where = rig.dir / "small"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "nvrx-test", str(where)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_full_disk_for_logs_does_not_end_the_job(rig: Rig, small_disk: Path) -> None:
    rig.logs = small_disk / "logs"
    script = rig.script("""
        try:
            while CYCLE == 0:
                os.write(1, b"x" * 4096)
        except OSError as error:
            assert error.errno == 28, error
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    one = rig.run(script, "--max-restarts=1")
    code = one.wait()
    assert "was killed by SIGKILL" in one.text  # the fault was there: the disk was full
    assert code == 0


def test_a_cycle_that_starts_on_a_full_disk_goes_on_without_its_logs(rig: Rig, small_disk: Path) -> None:
    """The first cycle fills the disk and dies of it, the second prints into nothing, and that is said once."""
    rig.logs = small_disk / "logs"
    script = rig.script("""
        try:
            while True:
                os.write(1, (b"x" * 4095 + b"\\n") if CYCLE == 0 else b"y" * 99)
                if CYCLE == 1:
                    break
        except OSError as error:
            assert error.errno == 28, error
            os._exit(3)
        with open(os.path.join(os.environ["NVRX_TEST_GATES"], f"done{RANK}"), "x"):
            pass
    """)
    one = rig.run(script, "--max-restarts=1", "--nproc-per-node=2", "--redirects=3")
    assert one.wait() == 0
    assert "exited with code 3" in one.text and "restart 1 of 1" in one.text
    assert one.text.count("No space left on device: what the workers write is lost in this cycle") == 1
    assert sorted(path.name for path in rig.dir.glob("done*")) == ["done0", "done1"]


def test_logs_that_cannot_be_made_end_no_training(rig: Rig) -> None:
    """Something is where the directory of the next cycle should be."""
    script = rig.script("""
        run = os.environ["NVRX_RUN_DIR"]
        if CYCLE == 0:
            open(os.path.join(run, "cycle_1"), "x").close()
            os._exit(3)
        print("unheard")
    """)
    one = rig.run(script, "--max-restarts=1")
    assert one.wait() == 0
    assert "Not a directory: what the workers write is lost in this cycle" in one.text and "unheard" not in one.text


# --- what is started ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "script", "code", "what"),
    [
        ((), "gone.py", 2, "the training script gone.py does not exist (in "),
        (("--run-path",), "gone.py", 2, "the training script gone.py does not exist"),
        (("--no-python",), "./gone-program", 2, "the program ./gone-program is not an executable file"),
        (("-m",), "no.such.module", 1, "exited with code 1"),
        (("--no-python", "-m"), "x", 2, "exclude each other"),
    ],
)
def test_what_cannot_be_started_is_said(rig: Rig, flags: tuple[str, ...], script: str, code: int, what: str) -> None:
    one = rig.run(script, *flags)
    assert one.wait() == code
    assert what in one.text and "internal error" not in one.text


def test_program_without_execute_permission(rig: Rig) -> None:
    (rig.dir / "plain").write_text("#!/bin/sh\n")
    one = rig.run("./plain", "--no-python")
    assert one.wait() == 2
    assert "the program ./plain is not an executable file" in one.text


def test_program_that_the_kernel_refuses(rig: Rig) -> None:
    """Found and executable, but its interpreter is not there: known only when a worker is started."""
    (rig.dir / "odd").write_text("#!/no/such/interpreter\n")
    (rig.dir / "odd").chmod(0o755)
    one = rig.run("./odd", "--no-python")
    assert one.wait() == 1
    assert "could not be started: ./odd: No such file" in one.text and "cannot start ./odd: No such file" in one.text


@pytest.mark.parametrize("way", ["script", "module", "run-path", "no-python"])
def test_ways_to_start_and_arguments(rig: Rig, way: str) -> None:
    script = rig.script("say(json.dumps([__name__, sys.argv[1:]]))", "prog.py")
    flags: dict[str, tuple[tuple[str, ...], str]] = {
        "script": ((), script),
        "module": (("-m",), "prog"),
        "run-path": (("--run-path",), script),
        "no-python": (("--no-python",), str(rig.dir / "wrapper")),
    }
    (rig.dir / "wrapper").write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    (rig.dir / "wrapper").chmod(0o755)
    given = ("--nnodes", "a b", "-m", "$HOME", "")
    one = rig.run(flags[way][1], *flags[way][0], args=given)
    assert one.wait() == 0
    assert json.loads(rig.log(0, 0, "out")) == ["__main__", list(given)]


# --- the environment of workers -------------------------------------------------------------------------------------

# docs of torchrun, "Environment Variables", and what its agent sets besides
DOCUMENTED = (
    "LOCAL_RANK RANK GROUP_RANK ROLE_RANK LOCAL_WORLD_SIZE WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID"
)
NOT_OURS = {"TORCHELASTIC_ENABLE_FILE_TIMER", "TORCHELASTIC_TIMER_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


def torchruns_names() -> set[str]:
    """Keys of the `worker_env` dictionary in the installed torch's agent, read without importing torch."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return set()
    source = Path(spec.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Dict):
            keys = {k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
            names |= keys if "LOCAL_RANK" in keys else set()
    return names


def test_environment_contract_of_torchrun(rig: Rig) -> None:
    script = rig.script("say(json.dumps(dict(os.environ)))")
    flags = ("--nproc-per-node=2", "--max-restarts=3", "--role=trainer")
    one = rig.run(script, *flags, NVRX_TOKEN="secret", MY_OWN="kept", OMP_NUM_THREADS="")
    assert one.wait() == 0
    env = json.loads(rig.log(0, 1, "out"))
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "ROLE_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "trainer", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "NVRX_CYCLE": "0", "MY_OWN": "kept",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    assert torchruns_names() - NOT_OURS - env.keys() == set()
    assert set(DOCUMENTED.split()) - env.keys() == set()
    assert 0 < int(env["MASTER_PORT"]) < 65536 and env["TORCHELASTIC_RUN_ID"] == rig.run_dir.parent.name
    assert Path(env["TORCHELASTIC_ERROR_FILE"]).parent.is_dir() and Path(env["NVRX_RUN_DIR"]) == rig.run_dir
    assert "NVRX_TOKEN" not in env and "secret" not in json.dumps(env)


def test_stdin_is_empty_and_no_descriptor_leaks(rig: Rig) -> None:
    script = rig.script("""
        fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]
        say(repr(sys.stdin.read()), fds, os.getsid(0) == os.getpid())
    """)
    one = rig.node(0, "1", script)
    assert one.wait() == 0
    assert rig.log(0, 0, "out") == "'' [0, 1, 2] True\n"


@pytest.mark.torch
def test_torchs_own_store_listens_on_the_master_port(rig: Rig) -> None:
    script = rig.script("""
        from datetime import timedelta
        from torch.distributed import TCPStore
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, RANK == 0, timedelta(seconds=30))
        store.set(f"hello{RANK}", "x")
        store.wait([f"hello{1 - RANK}"])
        say("met", CYCLE)
        if CYCLE == 0 and RANK == 1:
            os._exit(1)
    """)
    one = rig.run(script, "--nproc-per-node=2", "--max-restarts=1")
    assert one.wait(90) == 0
    assert rig.log(1, 0, "out") == "met 1\n"


# --- defects of our own ---------------------------------------------------------------------------------------------

INJECT = """
import sys
sys.path.insert(0, {repo!r})
from nvrx_slurm.core.job.coordinator import Coordinator
from nvrx_slurm.agent.workers import Workers
from nvrx_slurm.agent.program import AgentShell
def broken(*_, **__):
    print("fault injected", flush=True)
    raise RuntimeError("a defect")
{target} = broken
from nvrx_slurm.cli.run import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "target", ["Coordinator.on_failed", "Coordinator.on_joined", "Workers._exited", "Workers.start", "AgentShell.do"]
)
@pytest.mark.parametrize("nnodes", [1, 2])
def test_defect_ends_with_97_and_leaves_nothing(rig: Rig, target: str, nnodes: int) -> None:
    """Nobody waits for ever for a half of the program that broke; the other node learns of it at once."""
    entry = rig.dir / "entry.py"
    entry.write_text(INJECT.format(repo=str(REPO), target=target))
    script = rig.script("if RANK == 0:\n    os._exit(1)\nforever()")
    flags = (f"--nnodes={nnodes}", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{rig.port}", "--max-restarts=0")
    if nnodes == 1:
        flags = ("--max-restarts=0",)
    from agent_harness import Launcher

    argv = [sys.executable, str(entry), f"--log-dir={rig.logs}", *flags, script]
    one = Launcher(argv, rig.env(), rig.dir)
    rig.launchers.append(one)
    other = rig.node(1, "2", script) if nnodes == 2 else None
    assert one.wait(20) == 97
    assert "fault injected" in one.text
    assert "internal error, please report it" in one.text and "a defect" in one.text
    if other is not None and target in ("Coordinator.on_failed", "Workers._exited"):
        assert other.wait(20) == 97  # it was told; one that had not joined yet still looks for a coordinator
        assert "the coordinator on" in other.text
    elif other is not None:
        other.signal(signal.SIGTERM)
        assert other.wait() in (143, 97)
