"""`nvrx doctor`: a good installation, and each way in which one can be wrong."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import doctor, doctor_hooks, doctor_site
from nvrx_slurm.cli.doctor_site import OK, Line
from nvrx_slurm.cli.toolbox import main
from nvrx_slurm.health import policy
from nvrx_slurm.health.policy import HookSettings
from nvrx_slurm.slurm.munge import Munge

REPO = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="hooks are root's")

GOOD = {
    "Prolog": "{hooks}/prolog", "Epilog": "{hooks}/epilog", "HealthCheckProgram": "{hooks}/healthcheck",
    "HealthCheckInterval": "300 sec", "HealthCheckNodeState": "ANY", "PrologFlags": "Alloc,DeferBatch",
    "PrologEpilogTimeout": "60 sec", "MessageTimeout": "10 sec", "KillWait": "30 sec", "KillOnBadExit": "0",
    "SchedulerParameters": "defer,nohold_on_prolog_fail", "JobRequeue": "1", "ProctrackType": "proctrack/cgroup",
    "SLURM_VERSION": "24.11.5", "SLURM_CONF": "/etc/slurm/slurm.conf",
}  # fmt: skip


class Installed:
    """Hooks, slurm.conf as Slurm shows it, and a site file, all good until a test spoils one thing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hooks = root / "hooks"
        self.hooks.mkdir()
        for file in (REPO / "prolog").iterdir():
            (self.hooks / file.name).write_bytes(file.read_bytes())
            (self.hooks / file.name).chmod(file.stat().st_mode & 0o755)
        (root / "health.yaml").write_text("{}\n")
        self.slurm = {key: value.format(hooks=self.hooks) for key, value in GOOD.items()}
        self.conf: dict[str, object] = {"PYTHON": sys.executable, "PACKAGE": REPO, "CONFIG": root / "health.yaml"}
        self.scontrol = root / "scontrol"
        self.scontrol.write_text(f"#!/bin/sh\n[ -e {root}/config ] && /bin/cat {root}/config\n")
        self.scontrol.chmod(0o755)

    def write(self) -> None:
        shown = "".join(f"{key:23} = {value}\n" for key, value in self.slurm.items())
        (self.root / "config").write_text(f"Configuration data as of now\n{shown}\nSlurmctld(primary) at x is UP\n")
        (self.hooks / "hooks.conf").write_text("".join(f"{k}={v}\n" for k, v in self.conf.items()))

    def lines(self) -> dict[str, Line]:
        """By name, the worst of each; without those that depend on the machine."""
        found: dict[str, Line] = {}
        for line in [line for part in doctor.examine(scontrol=str(self.scontrol)) for line in part.lines]:
            if line.name not in ("munge", "numactl"):
                found[line.name] = line if line.status != OK or line.name not in found else found[line.name]
        return found


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(policy, "DEFAULT_CONFIG", str(tmp_path / "default.yaml"))
    (tmp_path / "default.yaml").symlink_to("health.yaml")
    monkeypatch.setattr(Munge, "find", lambda socket: None)  # without a munged, libmunge tries for seconds
    return Installed(tmp_path)


def test_a_good_installation_has_nothing_to_say(installed: Installed) -> None:
    installed.write()
    lines = installed.lines()
    assert [line for line in lines.values() if line.status != OK or line.advice] == []
    assert {"slurm", "prolog", "epilog", "healthcheck", "python", "site-file"} <= set(lines)


def _spoil_slurm(key: str, value: str) -> Callable[[Installed], object]:
    return lambda installed: installed.slurm.update({key: value})


def _spoil_conf(key: str, value: object) -> Callable[[Installed], object]:
    return lambda installed: installed.conf.update({key: value})


def _other_prolog(installed: Installed) -> None:
    (installed.root / "theirs").write_text("#!/bin/sh\nexit 0\n")
    installed.slurm["Prolog"] = str(installed.root / "theirs")


def _calling_prolog(installed: Installed) -> None:
    (installed.root / "theirs").write_text("#!/bin/sh\n/etc/nvrx/prolog || exit 1\n")
    installed.slurm["Prolog"] = str(installed.root / "theirs")


def _users_directory(installed: Installed) -> Path:
    (installed.root / "users").mkdir()
    os.chown(installed.root / "users", 65534, -1)
    return installed.root / "users"


def _users_log(installed: Installed) -> None:
    installed.conf["LOG"] = _users_directory(installed) / "log"


def _older_shell(installed: Installed) -> None:
    """It takes "settings" for a hook."""
    shell = (installed.hooks / "hook.sh").read_text()
    (installed.hooks / "hook.sh").write_text(shell.replace("settings)", "other)").replace("= settings", "= other"))


def _other_rules_for_jobs(installed: Installed) -> None:
    (installed.root / "default.yaml").unlink()
    (installed.root / "default.yaml").write_text("expect: {cpus: 1}\n")


def _users_python(installed: Installed) -> None:
    (installed.root / "python").symlink_to(sys.executable)
    os.chown(installed.root / "python", 65534, -1, follow_symlinks=False)
    installed.conf["PYTHON"] = installed.root / "python"


# name of the line: [(what is spoilt, status, words of text or advice)]
def _own_check(what: str) -> Callable[[Installed], object]:
    text = "own: [{{name: mine, {0}}}, {{name: good, run: /bin/true}}]\n"
    return lambda installed: (installed.root / "health.yaml").write_text(text.format(what))


SPOILT: list[tuple[str, Callable[[Installed], object], str, str]] = [
    ("prolog", _spoil_slurm("Prolog", "(null)"), "fail", "Prolog= is not ours"),
    ("prolog", _other_prolog, "fail", "theirs is not ours"),
    ("prolog", _calling_prolog, "warn", "must hand on the exit code"),
    ("prolog", _spoil_slurm("Prolog", "/no/such/prolog"), "warn", "not on this machine"),
    ("epilog", _spoil_slurm("Epilog", "(null)"), "fail", "Epilog= is not ours"),
    ("healthcheck", _spoil_slurm("HealthCheckProgram", "(null)"), "fail", "/healthcheck, then scontrol reconfigure"),
    ("health-check-interval", _spoil_slurm("HealthCheckInterval", "0 sec"), "fail", "HealthCheckInterval=300"),
    ("prolog-flags", _spoil_slurm("PrologFlags", "(null)"), "fail", "PrologFlags=Alloc,DeferBatch"),
    ("prolog-flags", _spoil_slurm("PrologFlags", "Contain"), "warn", "may start before"),
    ("requeue", _spoil_slurm("SchedulerParameters", "(null)"), "warn", "nohold_on_prolog_fail"),
    ("requeue", _spoil_slurm("JobRequeue", "0"), "warn", "JobRequeue=0"),
    ("prolog-timeout", _spoil_slurm("PrologEpilogTimeout", "65534"), "warn", "for ever"),
    ("epilog-timeout", _spoil_slurm("PrologEpilogTimeout", "20 sec"), "fail", "PrologEpilogTimeout=60"),
    ("prolog-timeout", _spoil_slurm("PrologTimeout", "5 sec"), "fail", "drains the node"),
    ("budgets", _spoil_slurm("MessageTimeout", "7 sec"), "warn", "takes 5 s"),
    ("budgets", _spoil_conf("PROLOG_BUDGET", "soon"), "fail", "PROLOG_BUDGET=soon"),
    ("budgets", _spoil_conf("HEALTHCHECK_BUDGET", 60), "fail", "kills a HealthCheckProgram"),
    ("hook-files", lambda i: (i.hooks / "hook.sh").chmod(0o777), "fail", "hook.sh can be changed"),
    ("hook-files", lambda i: (i.hooks / "epilog").chmod(0o644), "fail", "epilog is not"),
    ("hook-files", lambda i: (i.hooks / "start.py").unlink(), "fail", "start.py cannot be"),
    ("hook-files", lambda i: os.chown(i.hooks, 65534, -1), "fail", "can be changed"),
    ("hooks.conf", _spoil_conf("PYHTON", "/x"), "fail", "PYHTON"),
    ("hooks.conf", _spoil_conf("ON_ERROR", "drain"), "fail", "ON_ERROR is pass or fail"),
    ("python", _spoil_conf("PYTHON", ""), "fail", "absolute path"),
    ("python", _spoil_conf("PYTHON", "/no/such/python"), "fail", "/no/such/python"),
    ("python", _spoil_conf("PACKAGE", "/usr/share"), "fail", "/usr/share"),
    ("python", _users_python, "fail", "not trusted"),
    ("site-file-of-jobs", _other_rules_for_jobs, "warn", "which differs"),
    ("site-file-of-jobs", lambda i: (i.root / "default.yaml").unlink(), "warn", "ln -s "),
    ("site-file", _spoil_conf("CONFIG", "/no/such.yaml"), "fail", "nvrx health init"),
    ("site-file", lambda i: (i.root / "health.yaml").write_text("cheks: {}"), "fail", "did you mean checks"),
    ("own-checks", _own_check("run: /no/check"), "fail", "mine cannot be"),
    ("hook-files", _spoil_conf("LOG", "hooks.log"), "fail", "LOG=hooks.log"),
    ("hook-files", _users_log, "fail", "can be changed"),
    ("hooks.conf", _older_shell, "fail", "hook.sh is not"),
    ("kill-wait", _spoil_slurm("KillWait", "5 sec"), "warn", "KillWait=30"),
    ("proctrack", _spoil_slurm("ProctrackType", "proctrack/linuxproc"), "warn", "proctrack/cgroup"),
    ("kill-on-bad-exit", _spoil_slurm("KillOnBadExit", "1"), "warn", "--kill-on-bad-exit=0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "status", "words"), SPOILT, ids=[f"{s[0]} {s[3]}" for s in SPOILT])
def test_what_is_wrong_is_told_with_what_to_do(
    installed: Installed, name: str, spoil: Callable[[Installed], object], status: str, words: str
) -> None:
    spoil(installed)
    installed.write()
    line = installed.lines()[name]
    assert line.status == status and words in f"{line.text} {line.advice}", line
    assert line.advice


def test_a_budget_that_hook_sh_does_not_take(installed: Installed) -> None:
    for budget in ("0", "-1", "inf", "1e3", "10000", "", "6s"):
        installed.conf["PROLOG_BUDGET"] = budget
        installed.write()
        (line,) = [
            line for line in doctor_hooks._time(doctor_site.find_site(str(installed.hooks), str(installed.scontrol)))
        ]
        assert line.status == "fail" and f"PROLOG_BUDGET={budget}" in line.text


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_settings_are_what_hook_sh_reads(installed: Installed, end: str) -> None:
    """Ends of lines as of Windows, a last line without one, quotes, later lines over earlier ones."""
    installed.write()
    lines = ["ON_ERROR=pass", "# a comment = of ours", "", "LOG='/var/log/nvrx hooks'", f"SYSROOT={installed.root}"]
    with (installed.hooks / "hooks.conf").open("a", newline="") as file:
        file.write((end or "\n").join([*lines, "ON_ERROR=fail"]) + end)
    conf = doctor_site._conf(str(installed.hooks))
    assert (conf["LOG"], conf["SYSROOT"], conf["ON_ERROR"]) == ("/var/log/nvrx hooks", str(installed.root), "fail")
    assert set(conf) == doctor_hooks.SETTINGS
    assert installed.lines()["hook-files"].status == OK


def test_several_prologs_and_patterns(installed: Installed) -> None:
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


def test_exit_code_and_json(installed: Installed) -> None:
    installed.slurm["Prolog"] = "(null)"
    installed.write()
    done = CliRunner().invoke(main, ["doctor", "--json", "--scontrol", str(installed.scontrol)])
    lines = json.loads(done.stdout)
    assert done.exit_code == 1 and {"part", "name", "status", "text", "advice"} == set(lines[0])
    assert [(line["part"], line["status"]) for line in lines if line["name"] == "prolog"] == [("hooks", "fail")]


def test_a_user_is_not_told_of_failures_of_hooks_that_are_not_installed(installed: Installed) -> None:
    """F12: the first part is about jobs."""
    for key in ("Prolog", "Epilog", "HealthCheckProgram", "PrologFlags", "HealthCheckInterval"):
        installed.slurm[key] = "(null)"
    installed.write()
    done = CliRunner().invoke(main, ["doctor", "--scontrol", str(installed.scontrol)])
    job, hooks = done.stdout.split("\n\n")
    assert done.exit_code == 0 and "\nfail" not in done.stdout, done.stdout
    assert job.splitlines()[1].startswith("ok    slurm ") and len(hooks.splitlines()) == 3 and "not installed" in hooks


def test_without_slurm_it_says_so_and_goes_on(installed: Installed) -> None:
    done = CliRunner().invoke(main, ["doctor", "--scontrol", str(installed.scontrol), "--hooks", str(installed.hooks)])
    assert done.exit_code == 1 and done.stdout.splitlines()[1].startswith("fail  slurm ")
    assert "hook-files" in done.stdout and "Traceback" not in done.stdout


def test_the_document_knows_all_settings() -> None:
    text = (REPO / "docs" / "reference" / "slurm-hooks.md").read_text()
    table = text.partition("## hooks.conf")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", table, re.MULTILINE)) == doctor_hooks.SETTINGS
    site = text.partition("```yaml\nhooks:\n")[2].partition("```")[0]
    assert re.findall(r"^  (\w+):", site, re.MULTILINE) == list(HookSettings._fields)
    shell = (REPO / "prolog" / "hook.sh").read_text()
    template = (REPO / "prolog" / "hooks.conf").read_text()
    for name in doctor_hooks.SETTINGS:
        assert name in shell and f"{name}=" in template
    for name, seconds in doctor_hooks.BUDGETS_S.items():
        assert f"{name}={seconds:g}" in shell and f"| `{name}` | {seconds:g} |" in table
