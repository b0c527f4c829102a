"""The preflight and the file of a site: checks that cannot be run here, packages of the user, a file kept from him."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import WAIT_S, Launcher, Rig
from test_preflight_process import Bench, run

from nvrx_slurm.agent.preflight import PreflightSpec, Reclaim

MODULE = """
from nvrx_slurm.health.check import Check, Verdict
import users_package
CHECK = Check("any", "nothing", "Always.", lambda *_: users_package.WORD, lambda word, _: (Verdict.FAIL, word))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc/nvrx").mkdir(parents=True)
    return tmp_path / "root"


def site(root: Path, **document: object) -> Path:
    file = root / "etc/nvrx/health.yaml"
    file.write_text(json.dumps(document))
    return file


def with_packages(directory: Path) -> Path:
    """A directory with what only PYTHONPATH leads to."""
    directory.mkdir()
    (directory / "site_checks.py").write_text(MODULE)
    (directory / "users_package.py").write_text("WORD = 'the package of the user says so'\n")
    return directory


def looked_at(tmp_path: Path, root: Path) -> tuple[str, list[str]]:
    """Why the preflight does not let the node in, and what it said."""
    spec = PreflightSpec(("--when=preflight", "--only=mine", f"--sysroot={root}"), Reclaim(0.0, 512.0, 2.0))
    why: list[str] = []

    async def story(bench: Bench) -> None:
        bench.start()
        why.append(await bench.prepare())

    (tmp_path / "state").mkdir(mode=0o700)
    said = run(tmp_path / "state", story, spec).said
    return why[0], said


def test_the_checks_import_what_the_agent_can(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(with_packages(tmp_path / "packages"))
    site(root, own=[{"name": "mine", "python": "site_checks:CHECK", "when": ["preflight"]}])
    assert looked_at(tmp_path, root) == ("mine: the package of the user says so", [])


def job(rig: Rig, root: Path, **env: str) -> Launcher:
    return rig.run(rig.script("print('work')"), f"--sysroot={root}", "--nnodes=1", **env)


def test_pythonpath_is_enough_in_a_whole_job(rig: Rig, root: Path) -> None:
    packages = with_packages(root / "packages")
    site(root, own=[{"name": "mine", "python": "site_checks:CHECK", "when": ["preflight"]}])
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    one = job(rig, root, PYTHONPATH=path)
    assert one.wait() == 94 and "mine: the package of the user says so" in one.text, one.text


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"run": "/nowhere/check"}, "/nowhere/check cannot be used: No such file"),
        ({"python": "no.such:CHECK"}, "no.such:CHECK cannot be imported"),
    ],
)
def test_a_job_goes_on_without_a_check_that_cannot_be_run(
    rig: Rig, root: Path, own: dict[str, object], said: str
) -> None:
    """What is not of the preflight is not even mentioned."""
    elsewhere = {"name": "elsewhere", **own, "when": ["prolog"]}
    site(root, own=[elsewhere, {"name": "mine", **own, "when": ["preflight"], "on_unknown": "drain"}])
    one = job(rig, root)
    assert one.wait() == 0, one.text
    assert f"health check mine cannot tell: {said}" in one.text and "elsewhere" not in one.text


@pytest.mark.parametrize(
    "hide", [lambda file: file.chmod(0), lambda file: file.parent.chmod(0)], ids=["file", "directory"]
)
def test_a_site_file_that_users_may_not_read_is_said_and_the_rest_is_checked(
    root: Path, hide: Callable[[Path], None]
) -> None:
    """As an agent that is not root sees it: root here is without the right to read what its mode forbids."""
    file = site(root, expect={"cpus": 9999})
    hide(file)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and not shutil.which(drop[0]):
        pytest.skip("there is no setpriv")

    def ran(when: str) -> subprocess.CompletedProcess[str]:
        argv = [*drop, sys.executable, "-m", "nvrx_slurm.health", f"--when={when}", f"--sysroot={root}"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)

    try:
        preflight, prolog = ran("preflight"), ran("prolog")
    finally:
        file.parent.chmod(0o755)
    assert preflight.returncode != 2, preflight.stderr
    found = json.loads(preflight.stdout)
    (note,) = found["notes"]
    assert f"{file} may not be read by uid {os.geteuid()}: nothing is known of what" in note
    assert found["findings"] and found["verdict"] != "fail"
    assert prolog.returncode == 2 and str(file) in prolog.stderr


def health(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "nvrx_slurm.health", f"--sysroot={root}", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_an_untrusted_site_file_is_said_and_the_rest_is_checked(root: Path) -> None:
    """A job's user cannot help whose the file of the site is; of one that he named himself he can."""
    file = site(root, expect={"cpus": 9999})
    file.chmod(0o666)
    preflight, prolog, named = (
        health(root, "--when=preflight"),
        health(root),
        health(root, "--when=preflight", f"--config={file}"),
    )
    found = json.loads(preflight.stdout)
    (note,) = found["notes"]
    assert f"{file} is not trusted" in note and note.endswith(": nothing is known of what this node should have")
    assert found["findings"] and found["verdict"] != "fail"
    for refused in (prolog, named):
        assert refused.returncode == 2 and f"{file} is not trusted" in refused.stderr
    file.chmod(0o644)
    assert json.loads(health(root, "--when=preflight").stdout)["notes"] == []


def test_a_site_file_that_is_wrong_stays_an_error_at_the_preflight(root: Path) -> None:
    site(root, expect={"no_such": 1})
    assert health(root, "--when=preflight").returncode == 2
