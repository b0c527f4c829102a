"""Completion of the command lines, asked as the shells ask, and by the shells themselves where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
WAIT_S = 30.0
pytestmark = pytest.mark.skipif(not (BIN / "nvrx-run").exists(), reason="nvrx-run is not installed (pip install -e .)")


def clean_env(home: Path, **more: str) -> dict[str, str]:
    kept = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
    return kept | more


def run(argv: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(argv, cwd=cwd, env=clean_env(cwd, **env), capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def asked(shell: str, words: str, cwd: Path) -> list[str]:
    """What the program answers to `shell` for the last of `words`, each as "type,value"."""
    program = words.split()[0]
    variable = "_NVRX_COMPLETE" if program == "nvrx" else "_NVRX_RUN_COMPLETE"
    last = words.rpartition(" ")[2]
    place = last if shell == "fish" else str(words.count(" "))
    out = run([str(BIN / program)], cwd, COMP_WORDS=words, COMP_CWORD=place, **{variable: f"{shell}_complete"})
    if not out.strip():
        return []
    if shell == "zsh":  # three lines each: type, value, help
        lines = out.splitlines()
        return [",".join(pair) for pair in zip(lines[::3], lines[1::3], strict=True)]
    return [line.split("\t")[0] for line in out.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nvrx-run --nno", ["plain,--nnodes"]),
        ("ft_launcher --nno", ["plain,--nnodes"]),
        ("nvrx-run --rdzv_ba", ["plain,--rdzv-backend"]),
        ("nvrx-run --ft_param_rank_h", ["plain,--ft-rank-heartbeat-timeout"]),
        ("nvrx-run --fault-tol-cfg", ["plain,--fault-tol-cfg-path"]),
        ("nvrx-run --nproc-per-node ", ["plain,gpu", "plain,cpu", "plain,auto"]),
        ("nvrx-run --ft-numa-bind-strict f", ["plain,false"]),
        ("nvrx-run --ft-cfg-path so", ["file,so"]),
        ("nvrx-run --max-restarts 3 tr", ["file,tr"]),
        ("nvrx-run --max-restarts 3 --max-re", []),  # given already
        ("nvrx-run train.py --nno", ["file,--nno"]),  # the script's own
        ("nvrx-run train.py da", ["file,da"]),
        ("nvrx rep", ["plain,replay"]),
        ("nvrx replay ev", ["file,ev"]),
        ("nvrx completion f", ["plain,fish"]),
    ],
)
def test_what_may_stand_there(tmp_path: Path, shell: str, words: str, expected: list[str]) -> None:
    assert asked(shell, words, tmp_path) == expected


def test_every_built_flag_is_offered_and_no_other(tmp_path: Path) -> None:
    from nvrx_slurm.config import SETTINGS

    offered = {line.partition(",")[2] for line in asked("bash", "nvrx-run --", tmp_path)}
    built = {flag for item in SETTINGS.values() if item.built for flag in item.flags if flag.startswith("--")}
    assert offered == built | {"--version", "--help"}


def test_an_answer_loads_little(tmp_path: Path) -> None:
    code = (
        "import atexit, os, sys\n"
        "os.environ.update(COMP_WORDS='nvrx-run --nno', COMP_CWORD='1', _NVRX_RUN_COMPLETE='bash_complete')\n"
        "atexit.register(lambda: print({'yaml', 'torch', 'grpc', 'numpy', 'asyncio'} & set(sys.modules)))\n"
        "from nvrx_slurm.cli.run import main\n"
        "main()\n"
    )
    assert run([sys.executable, "-c", code], tmp_path).split() == ["plain,--nnodes", "set()"]


# --- the shells themselves ------------------------------------------------------------------------------------------


class Terminal:
    """An interactive shell on a terminal of its own."""

    def __init__(self, argv: list[str], cwd: Path, **env: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=clean_env(cwd, **env), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while text not in self.text:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"no {text!r} in {self.text!r}"
            self.text += os.read(self._master, 65536).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.mark.parametrize(
    ("shell", "setup"),
    [
        (["bash", "--norc", "--noprofile", "-i"], 'eval "$(nvrx completion)"'),
        (["zsh", "-f", "-i"], 'autoload -U compinit && compinit -u && eval "$(nvrx completion)"'),
    ],
    ids=["bash", "zsh"],
)
def test_typed_in_a_real_shell(tmp_path: Path, shell: list[str], setup: str) -> None:
    """Flags and the script by the Tab key; the job that they start proves what was completed."""
    path = shutil.which(shell[0])
    if path is None:
        pytest.skip(f"{shell[0]} is not installed")
    (tmp_path / "train_it.py").write_text("print('com' + 'pleted')")
    terminal = Terminal(shell, tmp_path, SHELL=path, PS1="ready> ", SLURM_CONF="/nonexistent")
    try:
        terminal.expect("ready> ")
        terminal.type(f"{setup}; echo set''up\n")
        terminal.expect("setup")
        terminal.type("nvrx-run --standa\t--log_di\t logs tra\t\n")
        terminal.expect("[rank 0] completed")
    finally:
        terminal.close()


def test_asked_by_fish(tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    (tmp_path / "train_it.py").write_text("")
    for words, expected in (("nvrx-run --nno", "--nnodes"), ("nvrx-run --max-restarts 3 tra", "train_it.py")):
        code = f"nvrx completion fish | source; complete -C '{words}'"
        out = run([fish, "--no-config", "-c", code], tmp_path)
        assert [line.split("\t")[0] for line in out.splitlines()] == [expected]


@pytest.mark.parametrize(("shell", "code"), [("/bin/zsh", 0), ("/bin/csh", 2), ("", 2)])
def test_the_shell_is_known_from_the_environment(tmp_path: Path, shell: str, code: int) -> None:
    done = subprocess.run(
        [BIN / "nvrx", "completion"],
        env=clean_env(tmp_path, SHELL=shell),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == code
    if code:
        assert "name one, as in: nvrx completion bash" in done.stderr
    else:
        assert done.stdout.startswith("#compdef nvrx-run") and "compdef _nvrx_completion nvrx\n" in done.stdout
