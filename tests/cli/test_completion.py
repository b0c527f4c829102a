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
from click.testing import CliRunner

from nvrx_slurm.cli import completion, run, toolbox
from nvrx_slurm.config import SETTINGS

BIN = Path(sys.executable).parent
WAIT_S = 30.0
installed = pytest.mark.skipif(not (BIN / "nvrx-run").exists(), reason="nvrx-run is not installed (pip install -e .)")


def clean_env(home: Path, **more: str) -> dict[str, str]:
    kept = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}
    return kept | more


def asked(shell: str, words: str) -> list[str]:
    """What the program answers to `shell` for the last of `words`, each as "type,value"."""
    program = words.split()[0]
    command, variable = (toolbox.main, "_NVRX") if program == "nvrx" else (run.main, "_NVRX_RUN")
    place = words.rpartition(" ")[2] if shell == "fish" else str(words.count(" "))
    env = {"COMP_WORDS": words, "COMP_CWORD": place, f"{variable}_COMPLETE": f"{shell}_complete"}
    lines = CliRunner().invoke(command, [], env=env, prog_name=program).output.splitlines()
    if shell == "zsh" and any(lines):  # three lines each: type, value, help
        return [",".join(pair) for pair in zip(lines[::3], lines[1::3], strict=True)]
    return [line.split("\t")[0] for line in lines if line]


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
def test_what_may_stand_there(shell: str, words: str, expected: list[str]) -> None:
    assert asked(shell, words) == expected


def test_every_supported_flag_is_offered_and_no_other() -> None:
    offered = {line.partition(",")[2] for line in asked("bash", "nvrx-run --")}
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.split() == ["plain,--nnodes", "set()"]


@pytest.mark.parametrize(("shell", "code"), [("/bin/zsh", 0), ("/bin/csh", 2), ("", 2)])
def test_the_shell_is_known_from_the_environment(shell: str, code: int) -> None:
    result = CliRunner().invoke(toolbox.main, ["completion"], env={"SHELL": shell})
    assert result.exit_code == code
    assert result.output.startswith("#compdef nvrx-run") or code == 2


# --- the shells themselves ------------------------------------------------------------------------------------------


def type_and_expect(shell: list[str], cwd: Path, steps: list[tuple[str, str]], **env: str) -> None:
    """Start an interactive shell on a terminal; of each step type the keys and wait for the text."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        shell, cwd=cwd, env=clean_env(cwd, **env), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        seen, deadline_s = "", time.monotonic() + WAIT_S
        try:
            for keys, text in steps:
                os.write(master, keys.encode())
                while text not in seen:
                    left_s = max(0.0, deadline_s - time.monotonic())
                    assert select.select([master], [], [], left_s)[0], f"no {text!r} in {seen!r}"
                    seen += os.read(master, 65536).decode(errors="replace")
        finally:
            process.kill()
            os.close(master)


@installed
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_typed_in_a_real_shell(tmp_path: Path, shell: str) -> None:
    """Flags and the script by the Tab key; the job that they start proves what was completed."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "train_it.py").write_text("print('com' + 'pleted')")
    argv = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    load = "autoload -U compinit && compinit -u && " if shell == "zsh" else ""
    steps = [
        ("", "ready> "),
        (f"{load}eval \"$(nvrx completion)\"; echo set''up\n", "setup"),
        ("nvrx-run --standa\t--log_di\t logs tra\t\n", "[rank 0] completed"),
    ]
    type_and_expect([path, *argv], tmp_path, steps, SHELL=path, PS1="ready> ", SLURM_CONF="/nonexistent")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_of_a_shell_asks_for_all_programs(shell: str) -> None:
    text = completion.script(shell)
    assert all(word in text for word in ("nvrx-run", "ft_launcher", "_NVRX_RUN_COMPLETE", "_NVRX_COMPLETE"))
