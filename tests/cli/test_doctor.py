"""`nvrx doctor`: a good installation, and each way in which one can be wrong."""

import importlib
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from toolbox import nvrx

from nvrx_slurm.cli.doctor import OK, examine
from nvrx_slurm.health import policy
from nvrx_slurm.health.policy import HookSettings
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.munge import Munge

REPO = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.fast, pytest.mark.skipif(os.geteuid() != 0, reason="hooks are root's")]

GOOD = {
    "Prolog": "{hooks}/prolog", "Epilog": "{hooks}/epilog", "HealthCheckProgram": "{hooks}/healthcheck",
    "HealthCheckInterval": "300 sec", "PrologFlags": "Alloc,DeferBatch", "KillOnBadExit": "0", "JobRequeue": "1",
    "SLURM_VERSION": "24.11.5", "SchedulerParameters": "defer,nohold_on_prolog_fail",
}  # fmt: skip


class Installed:
    """Hooks, slurm.conf as Slurm shows it, and a site file, all good until a test spoils one thing."""

    def __init__(self, root):
        self.root = root
        self.hooks = root / "hooks"
        self.hooks.mkdir()
        for file in (REPO / "prolog").iterdir():
            (self.hooks / file.name).write_bytes(file.read_bytes())
            (self.hooks / file.name).chmod(file.stat().st_mode & 0o755)
        (root / "health.yaml").write_text("{}\n")
        self.slurm = {key: value.format(hooks=self.hooks) for key, value in GOOD.items()}
        self.conf = {"PYTHON": sys.executable, "PACKAGE": REPO, "CONFIG": root / "health.yaml"}
        (root / "scontrol").write_text(f"#!/bin/sh\n[ -e {root}/config ] && /bin/cat {root}/config\n")
        (root / "scontrol").chmod(0o755)

    def write(self):
        shown = "".join(f"{key:23} = {value}\n" for key, value in self.slurm.items())
        (self.root / "config").write_text(f"Configuration data as of now\n{shown}\nSlurmctld(primary) at x is UP\n")
        (self.hooks / "hooks.conf").write_text("".join(f"{k}={v}\n" for k, v in self.conf.items()))

    def lines(self):
        """By name; without those that depend on the machine."""
        return {line.name: line for part in examine(*connect()).values() for line in part if line.name != "munge"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(policy, "DEFAULT_CONFIG", str(tmp_path / "default.yaml"))
    (tmp_path / "default.yaml").symlink_to("health.yaml")
    monkeypatch.setattr(Munge, "find", lambda socket: None)  # without a munged, libmunge tries for seconds
    return Installed(tmp_path)


def test_a_good_installation_has_nothing_to_say(installed):
    installed.write()
    lines = installed.lines()
    assert [line for line in lines.values() if line.status != OK or line.advice] == []
    assert {"slurm", "prolog", "epilog", "healthcheck", "python", "site-file", "pages"} <= set(lines)
    assert Path(lines["pages"].text.split()[-1], "docs/reference/configuration.md").is_file()


def _slurm(key, value):
    return lambda installed: installed.slurm.update({key: value})


def _conf(key, value):
    return lambda installed: installed.conf.update({key: value})


# name of the line, what is spoilt, status, words of text or advice
SPOILT = [
    ("prolog", _slurm("Prolog", "(null)"), "fail", "Prolog= is not ours"),
    ("prolog", _slurm("Prolog", "/bin/true"), "fail", "true is not ours"),
    ("epilog", _slurm("Epilog", "/no/such/epilog"), "fail", "not ours"),
    ("health-check-interval", _slurm("HealthCheckInterval", "0 sec"), "fail", "HealthCheckInterval=300"),
    ("prolog-flags", _slurm("PrologFlags", "(null)"), "fail", "PrologFlags=Alloc,DeferBatch"),
    ("requeue", _slurm("SchedulerParameters", "(null)"), "warn", "nohold_on_prolog_fail"),
    ("hook-files", lambda i: (i.hooks / "epilog").chmod(0o777), "fail", "epilog can be changed"),
    ("hook-files", lambda i: (i.hooks / "epilog").chmod(0o644), "fail", "epilog is not"),
    ("hook-files", lambda i: (i.hooks / "hook.sh").chmod(0o777), "fail", "hook.sh can be changed"),
    ("hook-files", lambda i: os.chown(i.hooks, 65534, -1), "fail", "can be changed"),
    ("python", _conf("PYTHON", "/no/such/python"), "fail", "/no/such/python"),
    ("python", _conf("PACKAGE", "/usr/share"), "fail", "/usr/share"),
    ("site-file", _conf("CONFIG", "/no/such.yaml"), "fail", "nvrx health init"),
    ("site-file", lambda i: (i.root / "health.yaml").write_text("cheks: {}"), "fail", "did you mean checks"),
    ("may-requeue", _slurm("JobRequeue", "0"), "info", "--requeue"),
    ("kill-on-bad-exit", _slurm("KillOnBadExit", "1"), "warn", "--kill-on-bad-exit=0"),
]


@pytest.mark.parametrize("name, spoil, status, words", SPOILT, ids=[f"{s[0]} {s[3]}" for s in SPOILT])
def test_what_is_wrong_is_told_with_what_to_do(installed, name, spoil, status, words):
    spoil(installed)
    installed.write()
    line = installed.lines()[name]
    assert line.status == status and words in f"{line.text} {line.advice}" and line.advice, line


def by_name(done):
    return {line["name"]: line for line in json.loads(done.stdout)}


def test_several_prologs_and_patterns(installed):
    """prolog.d/*, and a link in it to ours."""
    folder = installed.root / "prolog.d"
    folder.mkdir()
    (folder / "10-site").write_text("#!/bin/sh\n")
    (folder / "50-nvrx").symlink_to(installed.hooks / "prolog")
    installed.slurm["Prolog[0]"] = "/usr/bin/true"
    installed.slurm["Prolog[1]"] = f"{folder}/*"
    del installed.slurm["Prolog"]
    installed.write()
    assert installed.lines()["prolog"].status == OK


def test_hooks_that_are_not_installed_do_not_fail_others_do(installed):
    installed.slurm["Prolog"] = "(null)"
    installed.write()
    done = nvrx("doctor", "--json")
    lines = by_name(done)
    assert done.exit_code == 1 and set(lines["slurm"]) == {"part", "name", "status", "text", "advice"}
    assert (lines["prolog"]["part"], lines["prolog"]["status"]) == ("hooks", "fail")
    installed.slurm.update(dict.fromkeys(("Epilog", "HealthCheckProgram", "PrologFlags"), "(null)"))
    installed.write()
    done = nvrx("doctor")
    job, hooks = done.stdout.split("\n\n")
    assert done.exit_code == 0 and "\nfail" not in done.stdout, done.stdout
    assert job.splitlines()[1].startswith("ok    slurm ") and len(hooks.splitlines()) == 3 and "not installed" in hooks


def test_without_slurm_it_says_so_and_goes_on(installed):
    done = nvrx("doctor", "--hooks", installed.hooks)
    assert done.exit_code == 1 and done.stdout.splitlines()[1].startswith("fail  slurm ")
    assert "hook-files" in done.stdout and "Traceback" not in done.stdout


def test_a_pyslurm_that_does_not_load(installed, monkeypatch):
    """auto says why and uses the tools; where it was asked for, that is one sentence and exit code 2."""
    installed.write()
    (installed.root / "pyslurm").mkdir()
    (installed.root / "pyslurm" / "__init__.py").write_text("raise ImportError('libslurm.so.44 is missing')\n")
    monkeypatch.syspath_prepend(str(installed.root))
    monkeypatch.setenv("PYTHONPATH", f"{installed.root}:{REPO}")
    line = by_name(nvrx("doctor", "--json"))["slurm-api"]
    assert line["status"] == OK and "command line" in line["text"] and "libslurm.so.44 is missing" in line["text"]
    done = nvrx("doctor", "--slurm-api=pyslurm")
    assert done.exit_code == 2, done.output
    assert "libslurm.so.44 is missing" in done.stderr and "Traceback" not in done.stderr


def test_the_document_knows_all_settings():
    text = (REPO / "docs" / "reference" / "slurm-hooks.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| (\S*)", text.partition("## hooks.conf")[2], re.MULTILINE)
    site = text.partition("```yaml\nhooks:\n")[2].partition("```")[0]
    assert re.findall(r"^  (\w+):", site, re.MULTILINE) == list(HookSettings._fields)
    shell = (REPO / "prolog" / "hook.sh").read_text()
    template = (REPO / "prolog" / "hooks.conf").read_text()
    assert {name for name, _ in rows} == set(re.findall(r"^#?([A-Z_]+)=", template, re.MULTILINE))
    for name, default in rows:
        assert f"{name}={default}" in shell if name.endswith("_BUDGET") else name in shell


def test_what_a_template_would_leave_out(tmp_path, monkeypatch):
    (tmp_path / "regex.py").write_text("F = open('/etc/hostname')")
    (tmp_path / "PIL.py").write_text("")
    monkeypatch.setattr("nvrx_slurm.core.preload.CANDIDATES", ("PIL", "regex"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    line = by_name(nvrx("doctor", "--warm", "--json"))["warm-starts"]
    assert line["status"] == "info" and "regex" in line["text"]


def test_a_small_environment_without_torch_and_grpc(tmp_path):
    """The one of docs/how-to/install-slurm-hooks.md: what is missing is one sentence."""
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = tmp_path.glob("venv/lib/python3*/site-packages")
    (site / "ours.pth").write_text(f"{REPO}\n")

    def there(*words):
        command = [tmp_path / "venv/bin/python", "-m", "nvrx_slurm.cli.toolbox", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def install(*names):
        for name in names:
            (site / name).symlink_to(Path(importlib.import_module(name).__path__[0]))

    assert "pip install click" in there("doctor").stderr
    install("click", "yaml")
    assert "needs the Python module msgspec" in there("--help").stdout and there("list").returncode == 2
    assert {row["name"] for row in json.loads(there("doctor", "--json").stdout)} >= {"slurm", "munge", "hooks"}
    assert "expect:" in there("health", "init").stdout
    assert there("health", "run").returncode in (0, 1)
    serve = there("health", "serve", "--config=x")
    assert serve.returncode == 2 and "nvrx_slurm[node-service]" in serve.stderr
    page = (REPO / "docs/how-to/run-a-cluster.md").read_text()
    assert "pip install click msgspec pyyaml\n" in page
    install("msgspec")
    (row,) = re.findall(r"^\| login node.* \| click, msgspec, pyyaml: `nvrx (.*) \|$", page, re.MULTILINE)
    for command in re.findall(r"\w+", row):
        assert there(command, "--help").returncode == 0
