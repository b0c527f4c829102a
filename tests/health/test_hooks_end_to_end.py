"""Hooks as Slurm starts them: what hook.sh trusts as root, and that a verdict comes in time whatever hangs."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hooks_harness import DRAIN, FAILED, HOOKS, NOBODY, REPO, SHOW, SLACK_S, made, script
from recorded import HungMount, ended

from nvrx_slurm.health.hooks.run import REFUSE

pytestmark = HOOKS

LONG_S = 50  # of a hook that would wait for what hangs


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    found = made(tmp_path, monkeypatch)
    found.install()
    return found


def own(path, uid=NOBODY):
    os.chown(path, uid, -1, follow_symlinks=False)


@pytest.mark.parametrize("hook, code, asked", [("prolog", 1, [SHOW, DRAIN]), ("healthcheck", 0, [SHOW, SHOW, DRAIN])])
def test_each_hook_drains_a_broken_node(hooks, hook, code, asked):
    assert hooks.sh(hook, **FAILED).code == 0
    before = len(hooks.asked())
    assert before == (hook == "healthcheck")
    hooks.break_lustre()
    ran = hooks.sh(hook, **FAILED)
    assert ran.code == code and "drained: nvrx:lustre" in ran.log
    assert hooks.asked()[before:] == asked[before:]


def test_people_without_a_terminal_see_what_happens(hooks):
    """As root by ssh; but not a daemon of Slurm, whose pipe a blocked process would hold open."""

    def said(*around):
        words = [*around, str(hooks.root / "hooks/prolog")]
        done = subprocess.run(words, env={}, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert done.stdout == ""
        return done.stderr

    assert "exit code 0" in said()
    hooks.break_lustre()
    assert "lustre" in said() and "exit code 1" in said()
    slurmd = script(hooks.root / "slurmd", '"$@"; exit')  # the name of a process is that of its script
    assert said(str(slurmd), "/bin/sh") == ""
    hooks.install(PYTHON="/nowhere/bin/python3")
    assert "/nowhere" in said()


def test_the_environment_and_folder_of_the_caller_do_not_matter(hooks, tmp_path):
    trap, shown = tmp_path / "trap", tmp_path / "shown"
    trap.mkdir()
    for name in ("sitecustomize.py", "json.py", "nvrx_slurm.py", "encodings.py", "os.py"):
        (trap / name).write_text("raise SystemExit('trapped')")
    (trap / "sh.env").write_text("exit 9\n")
    hooks.site(own=[{"name": "shows", "run": [str(script(tmp_path / "own", f"/usr/bin/env >{shown}"))]}])
    hostile = {
        "PYTHONPATH": str(trap), "PYTHONHOME": str(trap), "PYTHONSTARTUP": str(trap / "json.py"), "TMPDIR": str(trap),
        "ENV": str(trap / "sh.env"), "BASH_ENV": str(trap / "sh.env"), "PATH": str(trap), "IFS": "/n",
        "NVRX_PACKAGE": str(trap), "NVRX_CONFIG": "/nowhere", "LANG": "xx", "SLURM_JOB_WORK_DIR": str(trap),
        "CUDA_VISIBLE_DEVICES": "3", "SLURM_JOB_COMMENT": "$(exit 9) `exit 9` ; exit 9 \n exit 9",
    }  # fmt: skip
    assert hooks.sh("prolog", **hostile).code == 0
    names = {line.partition("=")[0] for line in shown.read_text().splitlines() if "=" in line}
    assert names <= {"PATH", "LC_ALL", "PWD", "_", "OLDPWD", "SHLVL"} | {n for n in names if n.startswith("SLURM")}
    assert str(trap) not in shown.read_text()


def _package(hooks):
    """A copy of the package that leaves a mark when it is imported."""
    place = hooks.root / "packages"
    shutil.copytree(REPO / "nvrx_slurm", place / "nvrx_slurm")
    for name in ("__init__.py", "system/trust.py"):
        with (place / "nvrx_slurm" / name).open("a") as file:
            file.write(f"\nimport os\nos.close(os.open({str(hooks.root / 'ran')!r}, os.O_CREAT | os.O_WRONLY))\n")
    hooks.install(PACKAGE=place)
    return place


def _python(hooks):
    """A Python in a folder of its own, reached by a link."""
    there, here = hooks.root / "there", hooks.root / "bin"
    there.mkdir()
    here.mkdir()
    script(there / "python", f': >{hooks.root}/ran\nunset PYTHONHOME\nexec {sys.executable} "$@"')
    (here / "python").symlink_to(there / "python")
    (hooks.root / "lib/python3.11").mkdir(parents=True)
    (hooks.root / "lib/python3.11/os.py").touch()
    hooks.install(PYTHON=here / "python")
    return there


def _copied_venv(hooks):
    """A virtual environment with a copy of Python, whose `home` is in another folder; that leaves a mark (D7)."""
    base, venv, home = Path(sys.base_prefix), hooks.root / "venv", hooks.root / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), venv / "bin/python")
    (venv / "pyvenv.cfg").write_text(f"home = {home}/bin\n")
    library = home / "lib" / version
    library.mkdir(parents=True)
    (home / "bin").mkdir()
    for entry in (base / "lib" / version).iterdir():
        if entry.name == "encodings":
            shutil.copytree(entry, library / "encodings")
        elif entry.name != "site-packages":
            (library / entry.name).symlink_to(entry)
    code = f"\nimport posix\nposix.close(posix.open({str(hooks.root / 'ran')!r}, posix.O_CREAT | posix.O_WRONLY))\n"
    with (library / "encodings/__init__.py").open("a") as file:
        file.write(code)
    site = Path(os.__file__).parent / "site-packages"
    site = site if (site / "yaml").exists() else Path(sys.prefix) / "lib" / version / "site-packages"
    (venv / "lib" / version).mkdir(parents=True)
    (venv / "lib" / version / "site-packages").symlink_to(site)
    hooks.install(PYTHON=venv / "bin/python")
    return library


# Each is trusted as long as it is root's: (prepare, spoil, whether the rest of the package may run).
SPOILT = {
    "a module of a user": (_package, lambda p: own(p / "nvrx_slurm/health/hooks/run.py"), True),
    "the rule itself": (_package, lambda p: (p / "nvrx_slurm/system/trust.py").chmod(0o666), False),
    "a Python of a user": (_python, lambda p: own(p / "python"), False),
    "a link of a user": (_python, lambda p: own(p.parent / "bin/python"), False),
    "a standard library of a user": (_copied_venv, lambda p: own(p), False),
    "a module of the standard library": (_copied_venv, lambda p: own(p / "encodings/utf_8.py"), False),
    "a home of a user": (_copied_venv, lambda p: own(p.parents[1] / "bin"), False),
}


@pytest.mark.parametrize("what", SPOILT)
def test_nothing_that_a_user_can_change_is_run(hooks, what):
    prepare, spoil, rest_runs = SPOILT[what]
    place = prepare(hooks)
    mark = hooks.root / "ran"
    done = hooks.version()
    assert done.returncode == 0 and mark.exists(), f"the copy is not run: {done.stderr}"
    mark.unlink()
    spoil(place)
    hooks.break_lustre()
    hooks.install(ON_ERROR="fail")
    assert hooks.sh("prolog").code == 1 and hooks.asked() == []
    assert mark.exists() == rest_runs, "something was run that is not trusted"


def test_no_file_of_the_hooks_is_run_that_others_can_change(hooks):
    for name in ("hook.sh", "hooks.conf", "start.py"):
        file = hooks.root / "hooks" / name
        file.chmod(0o777)
        assert hooks.sh("prolog")[::2] == (0, ""), name
        file.chmod(0o755)


def test_without_its_tools_hook_sh_trusts_nothing(hooks):
    _package(hooks)
    shell = hooks.root / "hooks/hook.sh"
    text = shell.read_text()
    for tool in ("namei", "find"):
        shell.write_text(text.replace(f"/usr/bin/{tool}", f"/no/such/{tool}"))
        assert hooks.version().returncode == 1 and not (hooks.root / "ran").exists(), tool


def test_a_module_that_exits_does_not_report_a_healthy_node(hooks):
    place = _package(hooks)
    (place / "nvrx_slurm/__init__.py").write_text("raise SystemExit(0)\n")
    hooks.install(ON_ERROR="fail")
    assert hooks.sh("prolog").code == 1


def test_wrong_settings_do_not_drain_the_cluster(hooks):
    file = hooks.root / "hooks/hooks.conf"
    for text in ("", "PYTHON=/no/such/python\n", "PYTHON=python\n", "PYTHON=`exit 9`\n(\n\0\xff"):
        file.write_bytes(text.encode("latin-1"))
        assert hooks.sh("prolog").code == 0, text


def test_a_wrong_budget_is_handled_as_on_error_says(hooks):
    hooks.break_lustre()
    for budget in ("abc", "", "-5", "0.00", "1e9", "99999.5", "1.2.3"):
        hooks.install(PROLOG_BUDGET=budget, ON_ERROR="fail")
        assert hooks.sh("prolog")[::2] == (1, ""), budget
    hooks.install(ON_ERROR="pass")
    assert hooks.sh("prolog").code == 0
    assert hooks.asked() == []
    hooks.install(PROLOG_BUDGET="59.5", ON_ERROR="pass")
    assert hooks.sh("prolog").code == 1 and hooks.asked()


@pytest.mark.parametrize("on_error, code", [("pass", 0), ("fail", 1)])
def test_a_python_that_never_starts_is_given_up(hooks, on_error, code):
    place = _python(hooks)
    script(place / "python", f"trap '' ALRM TERM\necho $$ >{hooks.root}/pid\nexec sleep 600")
    hooks.install(PROLOG_BUDGET=1, ON_ERROR=on_error)
    ran = hooks.sh("prolog")
    assert ran.code == code and ran.took_s < 1 + SLACK_S
    assert ended(int((hooks.root / "pid").read_text()))


@pytest.fixture
def dead(tmp_path):
    """A folder of a file system that takes a question and never answers: SIGKILL does not end the process."""
    place = tmp_path / "dead"
    place.mkdir()
    mount = HungMount(place)
    taken = threading.Thread(target=mount.take)
    taken.start()
    yield place
    asked = not taken.is_alive()
    mount.close()
    taken.join()
    assert asked, "nothing has looked at the dead disk"


def test_a_python_on_a_dead_file_system_is_given_up(hooks, dead):
    hooks.install(PROLOG_BUDGET=1, PYTHON=dead / "x")
    ran = hooks.sh("prolog")
    assert ran.code == 0 and ran.took_s < 1 + SLACK_S


def test_a_verdict_outlives_a_scontrol_that_hangs(hooks, dead):
    """A sick node must not stay in use because the drain is blocked in the kernel."""
    hooks.install(SCONTROL=dead / "scontrol", PROLOG_BUDGET=4)
    hooks.break_lustre()
    ran = hooks.sh("prolog")
    assert ran.code == 1 and ran.took_s < 4 + SLACK_S


def test_a_verdict_outlives_the_search_for_scontrol(hooks, dead):
    """/opt/slurm is on a network file system, and SCONTROL is not set."""
    hooks.break_lustre()
    names = ("LOG", "SYSROOT", "CONFIG")
    env = {"NVRX_BUDGET": "4", "SLURM_JOB_ID": "7", **{f"NVRX_{name}": str(hooks.settings[name]) for name in names}}
    code = f"""import sys
from nvrx_slurm.health.hooks import run
from nvrx_slurm.slurm.api import tools
tools.PLACES = ({str(dead)!r},)
sys.exit(run.main("prolog", {env!r}))"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, stderr=subprocess.PIPE, timeout=4 + SLACK_S)
    assert done.returncode == REFUSE and b"does not answer" in done.stderr


def test_a_dead_disk_below_log_keeps_no_sick_node_in_use(hooks, dead):
    hooks.install(LOG=dead / "log", PROLOG_BUDGET=LONG_S)
    hooks.break_lustre()
    ran = hooks.sh("prolog")
    assert ran.code == 1 and DRAIN in hooks.asked() and ran.took_s < LONG_S / 2


class SystemLog:
    """A /dev of the hook's own, with a /dev/log that takes messages until `fill`."""

    def __init__(self, directory):
        (directory / "null").touch()
        self.path = directory / "log"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        mount = shutil.which("mount")
        text = f'{mount} --bind /dev/null {directory}/null && {mount} --rbind {directory} /dev && exec "$@"'
        self.around = [shutil.which("unshare") or "", "-m", "/bin/sh", "-c", text, "sh"]

    def fill(self):
        """As if its daemon were stopped."""
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
            pytest.raises(BlockingIOError),
        ):
            while True:
                sender.sendto(b"<30>x", str(self.path))


@pytest.fixture
def system_log(hooks):
    with TemporaryDirectory() as directory:  # pytest's are too long for a socket
        found = SystemLog(Path(directory))
        if not found.around[0] or subprocess.run([*found.around, "/bin/true"]).returncode:
            pytest.skip("no mount namespaces here")
        hooks.around = found.around
        yield found
        found.socket.close()


@pytest.mark.parametrize("works", [True, False])
def test_a_system_log_that_hangs_delays_no_hook(hooks, system_log, works):
    (hooks.root / "empty").mkdir()
    hooks.install(PROLOG_BUDGET=LONG_S, ON_ERROR="fail", **({} if works else {"PACKAGE": hooks.root / "empty"}))
    hooks.break_lustre()
    system_log.fill()
    ran = hooks.sh("prolog")
    assert ran.code == 1 and ran.took_s < LONG_S / 2 and (DRAIN in hooks.asked()) == works
