"""What workers print and how it is shown; consoles and disks that misbehave; what is started, in which environment."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


F_SETPIPE_SZ = 1031


def test_much_output_and_last_lines_without_a_newline_arrive(rig):
    script = rig.script("""
        for n in range(5000):
            say(n, "x" * 40)
        os.write(1, b"last out")
        os.write(2, b"last err")
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    one = rig.run(script)
    assert one.wait() == 1
    got = [line.split()[2] for line in one.text.splitlines() if line.startswith("[rank 0] ") and "xxx" in line]
    assert got == [str(n) for n in range(5000)]
    assert rig.log(0, 0, "out").endswith("\nlast out") and rig.log(0, 0, "err") == "last err"
    assert {"[rank 0] last out", "[rank 0] last err"} <= set(one.text.splitlines())


@pytest.mark.parametrize(
    "flags, stdout, stderr",
    [
        ("", "0out 1out", "0err 1err"),
        ("--redirects 0:3,1:2", "1out", ""),
        ("-r 1 --local_ranks_filter=0", "", "0err"),
        ("--console-prefix=none -t 3", "out out", "err err"),
    ],
)
def test_redirects_tee_and_filter(rig, flags, stdout, stderr):
    """Everything is in the files, whatever is shown; stdout and stderr stay apart."""
    script = rig.script("say('out'); print('err', file=sys.stderr)")
    one = rig.ran(script, "--nproc-per-node=2", *flags.split(), split=True)
    both = one.text, one.process.stderr.read().decode()
    if "none" in flags:
        shown = [sorted(x for x in text.splitlines() if x in ("out", "err")) for text in both]
    else:
        shown = [sorted(x[6] + x.split()[2] for x in text.splitlines() if x.startswith("[rank ")) for text in both]
    assert shown == [stdout.split(), stderr.split()]
    assert [rig.log(0, r, kind) for r in (0, 1) for kind in ("out", "err")] == ["out\n", "err\n"] * 2


def test_closed_stdout_and_stderr_do_no_harm(rig):
    """The descriptors 1 and 2 must not become other files of ours that the console then writes to."""
    script = rig.script("for n in range(500): say('loud', n)")
    command = f"exec {sys.executable} -m nvrx_slurm.cli.run --log-dir={rig.logs} {script} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], env=rig.env(), cwd=rig.dir, timeout=30)
    assert done.returncode == 0
    assert rig.log(0, 0, "out").count("loud") == 500
    events = list((rig.run_dir / "events").iterdir())
    assert len(events) == 2 and all(json.loads(line) for path in events for line in path.read_text().splitlines())


@pytest.mark.parametrize("gone", [False, True])
def test_a_console_without_a_reader_stops_nothing(rig, gone):
    """The pipe is full long before the workers are done, or its reader has gone; the log file has everything."""
    one = rig.run(rig.script("say('a'); gate()\nfor n in range(3000): say('x' * 80)"))
    one.line("a$")
    if gone:
        with open(os.devnull) as other:
            os.dup2(other.fileno(), one.process.stdout.fileno())
    else:
        fcntl.fcntl(one.process.stdout.fileno(), F_SETPIPE_SZ, 4096)
    rig.open()
    assert one.process.wait(30) == 0
    assert rig.log(0, 0, "out").count("\n") == 3001
    one.wait()


@pytest.fixture
def small_disk(rig):
    """A file system of 128 KiB."""
    where = rig.dir / "small"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "nvrx-test", str(where)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_cycle_that_starts_on_a_full_disk_goes_on_without_its_logs(rig, small_disk):
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
    one = rig.ran(script, "--max-restarts=1", "--nproc-per-node=2", "--redirects=3")
    assert "exited with code 3" in one.text and "restart 1 of 1" in one.text
    assert one.text.count("No space left on device: what the workers write is lost in this cycle") == 1
    assert sorted(path.name for path in rig.dir.glob("done*")) == ["done0", "done1"]


def test_what_cannot_be_started_is_said(rig):
    (rig.dir / "odd").write_text("#!/no/such/interpreter\n")
    (rig.dir / "odd").chmod(0o755)
    one = rig.run("./odd", "--no-python")
    assert one.wait() == 1
    assert "could not be started: ./odd: No such file" in one.text and "internal error" not in one.text


@pytest.mark.parametrize("flag, program", [("-m", "prog"), ("--run-path", "prog.py"), ("--no-python", "./wrapper")])
def test_ways_to_start_and_arguments(rig, flag, program):
    script = rig.script("say(json.dumps([__name__, sys.argv[1:]]))", "prog.py")
    (rig.dir / "wrapper").write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    (rig.dir / "wrapper").chmod(0o755)
    given = ["--nnodes", "a b", "-m", "$HOME", "", "--out=${local_rank}/of-${local_rank}"]
    rig.ran(program, flag, "--nproc-per-node=2", args=given)
    for rank in (0, 1):
        assert json.loads(rig.log(0, rank, "out")) == ["__main__", [*given[:-1], f"--out={rank}/of-{rank}"]]


@pytest.mark.parametrize("command", [[sys.executable, "-m", "nvrx_slurm"], ["torchrun"]], ids=["-m", "torchrun"])
def test_other_names_of_the_launcher(tmp_path, command):
    """What LLaMA-Factory starts by the name torchrun, with the link that docs/how-to/use-hugging-face.md makes."""
    (tmp_path / "torchrun").symlink_to(Path(sys.executable).with_name("nvrx-run"))
    (tmp_path / "train.py").write_text("import os; print(os.environ['NVRX_CYCLE'], os.environ['WORLD_SIZE'])")
    words = ["--nnodes=1", "--node_rank=0", "--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port=0"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = subprocess.run(
        [*command, *words, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout.split().count("0")) == (0, 2), done.stdout + done.stderr


def test_environment_contract_of_torchrun(rig):
    """What its documentation calls "Environment Variables", and ours."""
    script = rig.script("""
        fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]
        say(json.dumps([dict(os.environ), [sys.stdin.read(), fds, os.getsid(0) == os.getpid()]]))
    """)
    flags = ("--nproc-per-node=2", "--max-restarts=3", "--role=trainer")
    of_another_run = {"NVRX_RESUME_FROM": "/b", "NVRX_RESUME_BEFORE": "7", "NVRX_KEEPER_BYTES": "9", "NVRX_BOARD": "/c"}
    rig.ran(script, *flags, NVRX_TOKEN="secret", MY_OWN="kept", OMP_NUM_THREADS="", **of_another_run)
    env, shape = json.loads(rig.log(0, 1, "out"))
    assert shape == ["", [0, 1, 2], True]  # stdin is empty, no descriptor leaks, a session of its own
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "ROLE_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2", "ROLE_NAME": "trainer", "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False",
        "NVRX_CYCLE": "0", "MY_OWN": "kept",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    assert 0 < int(env["MASTER_PORT"]) < 65536 and env["TORCHELASTIC_RUN_ID"] == rig.run_dir.parent.name
    assert Path(env["TORCHELASTIC_ERROR_FILE"]).parent.is_dir() and Path(env["NVRX_RUN_DIR"]) == rig.run_dir
    assert "NVRX_TOKEN" not in env and "secret" not in json.dumps(env)
    assert not env.keys() & of_another_run.keys()


INJECT = """
import importlib
from nvrx_slurm.node.workers import workers
workers._CLOSE_TIMEOUT_S = 0.5  # the loop calls a broken reader again and again
def broken(*_, **__):
    print("fault injected", flush=True)
    raise RuntimeError("a defect")
setattr(getattr(importlib.import_module("nvrx_slurm.{module}"), "{cls}"), "{method}", broken)
"""


@pytest.mark.parametrize(
    "module, cls, method",
    [("core.coordinator.running", "Running", "on_failed"), ("node.workers.workers", "Workers", "_exited")],
)
def test_a_defect_ends_with_97_and_leaves_nothing(rig, module, cls, method):
    """The other node learns of it at once."""
    script = rig.script("if RANK == 0:\n    os._exit(1)\nforever()")
    other = rig.node(1, "2", script)
    rig.before = INJECT.format(module=module, cls=cls, method=method)
    one = rig.node(0, "2", script)
    assert [one.wait(), other.wait()] == [97, 97]
    assert "fault injected" in one.text and "internal error" in one.text and "a defect" in one.text
    assert "job ends with code 97: the coordinator" in other.text
