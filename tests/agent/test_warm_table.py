"""A forked worker cannot be told from one that was executed: one table of facts, one of ends, on each Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
DRIVER = Path(__file__).with_name("warm_driver.py")
BOUND_S = 60
sys.path.insert(0, str(DATA))
import warm_ends  # noqa: E402


def _pythons() -> dict[str, str]:
    """Our own Python, and those of other versions that pyenv has here."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for path in sorted(Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python")):
        found.setdefault(path.parts[-3].rpartition(".")[0], str(path))
    return found


PYTHONS = _pythons()


def start(directory: Path, argv: list[str], envs: list[dict[str, str]], preload: list[str] | None, **how: Any) -> Any:
    """What the workers of one job say: executed, or forked from a template with `preload`."""
    private = directory / f"private-{'forked' if preload else 'executed'}"
    private.mkdir()
    order = {"argv": argv, "envs": envs, "preload": preload, "path0": how.get("path0"), "directory": str(private)}
    program = f"import os, sys; os.environ['NVRX_TEST_AGENT'] = str(os.getpid()); sys.argv[0] = {str(DRIVER)!r}; "
    program += "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    env = {**os.environ, "RANK": "9", **how.get("env", {})}  # a rank's variable of the agent's own is not the worker's
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(order), env=env, cwd=how.get("cwd", directory), text=True, capture_output=True,
        timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["said"] == []
    return result["workers"]


STARTS = ["script", "relative", "symlink", "module", "run_path", "folder", "zip"]


def _lay_out(directory: Path, python: str, how: str) -> tuple[list[str], str | None]:
    """The command line of a worker, and what Python puts in front of sys.path."""
    (directory / "beside.py").write_text("")
    script, probe = directory / "train.py", (DATA / "warm_probe.py").read_text()
    script.write_text(probe)
    line, path0 = [python, "-u"], str(directory)
    if how == "script":
        return [*line, str(script), "--flag", "value"], path0
    if how == "relative":
        return [*line, "train.py"], path0
    if how == "symlink":
        (directory / "elsewhere").mkdir()
        (directory / "elsewhere" / "link.py").symlink_to(script)
        return [*line, str(directory / "elsewhere" / "link.py")], path0
    if how == "module":
        return [*line, "-m", "train", "x"], path0
    if how == "run_path":
        code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        return [*line, "-c", code, str(script)], ""
    inside = directory / "inside"
    inside.mkdir()
    (inside / "__main__.py").write_text(probe)
    (inside / "beside.py").write_text("")
    if how == "zip":
        with zipfile.ZipFile(directory / "train.zip", "w") as archive:
            for name in ("__main__.py", "beside.py"):
                archive.write(inside / name, name)
        return [*line, str(directory / "train.zip")], None
    return [*line, str(inside)], None


@pytest.mark.parametrize("how", STARTS)
@pytest.mark.parametrize("version", PYTHONS)
def test_facts(tmp_path: Path, version: str, how: str) -> None:
    argv, path0 = _lay_out(tmp_path, PYTHONS[version], how)
    facts = []
    for preload in (None, ["decimal", "asyncio"]):
        ((code, out, err),) = start(tmp_path, argv, [{"RANK": "0", "NVRX_CYCLE": "3"}], preload, path0=path0)
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["forked"] is (preload is not None)
        facts.append(found["facts"])
    assert len(facts[0]) >= 15 and not [fact for fact in facts[0].items() if "Error" in str(fact)]
    for name, executed in facts[0].items():
        assert facts[1][name] == executed, name


def _plain(text: str) -> str:
    """Without what differs from process to process."""
    return re.sub(r"0x[0-9a-f]+|random 0\.\d+|hash -?\d+|pid \d+", "...", text)


@pytest.mark.parametrize("version", PYTHONS)
def test_ends(tmp_path: Path, version: str) -> None:
    argv = [PYTHONS[version], "-u", str(DATA / "warm_ends.py")]
    envs = [{"ROLE_NAME": name} for name in ("forked", *warm_ends.ENDS)]
    executed, forked = (start(tmp_path, argv, envs, preload, path0=str(DATA)) for preload in (None, ["decimal"]))
    assert (executed[0][1], forked[0][1]) == ("False\n", "True\n")
    for name, before, after in zip(warm_ends.ENDS, executed[1:], forked[1:], strict=True):
        assert [before[0], *map(_plain, before[1:])] == [after[0], *map(_plain, after[1:])], name
