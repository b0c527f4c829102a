"""The rule of trust.py: files, links, user namespaces, and links into mount namespaces of users."""

import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from hooks_harness import NOBODY, REPO, as_root, made, script
from waits import WAIT_S

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import trust

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not as_root(), reason="only root distrusts what others can change"),
]

OTHER = 65533


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    return made(tmp_path, monkeypatch)


def refused(path):
    with pytest.raises(UsageError) as error:
        trust.require(str(path), UsageError)
    return str(error.value)


def give(*places):
    for place in places:
        os.chown(place, NOBODY, -1, follow_symlinks=False)


def test_what_is_roots_is_trusted_and_resolved_as_the_kernel_does(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = script(tmp_path / "a" / "file", "")
    (tmp_path / "link").symlink_to("a/./b")
    (tmp_path / "far").symlink_to(tmp_path / "link" / ".." / "file")
    for path in (file, tmp_path / "link" / ".." / "file", tmp_path / "far"):
        assert trust.require(str(path), UsageError) == str(file) == os.path.realpath(path)


def test_every_directory_and_link_on_the_way_counts(tmp_path):
    file = script(tmp_path / "file", "")
    users, link = tmp_path / "users", tmp_path / "link"
    users.mkdir()
    (users / "link").symlink_to(file)
    link.symlink_to(users / "link")
    assert trust.require(str(link), UsageError) == str(file)
    give(users / "link")
    assert f"{users}/link can be changed by others than root" in refused(link)
    os.chown(users / "link", 0, -1, follow_symlinks=False)
    give(users)
    assert f"{users} can be changed by others than root" in refused(link)
    os.chown(users, 0, -1)
    users.chmod(0o777)
    assert f"{users} can be changed by others than root" in refused(link)
    users.chmod(0o1777)  # like /tmp: what is root's in it stays
    assert trust.require(str(link), UsageError) == str(file)


def test_links_without_end_and_into_proc_are_refused(tmp_path):
    (tmp_path / "round").symlink_to("round")
    assert "too many links" in refused(tmp_path / "round")
    (tmp_path / "magic").symlink_to("/proc/self/root/bin/sh")
    assert "leads into /proc" in refused(tmp_path / "magic")
    assert "No such file" in refused(tmp_path / "nothing")


# What is spoilt of a package `any_package` with a module in it: (how, whether the package itself is found).
SPOILT = {
    "nothing": (lambda package: None, True),
    "a module that all can write to": (lambda package: (package / "module.py").chmod(0o666), True),
    "a compiled module of a user": (lambda package: give(_compiled(package, "module.cpython-311.pyc")), True),
    "a folder for compiled modules of a user": (lambda package: give(_compiled(package, "").parent), False),
    "a package of a user": (lambda package: give(package), False),
    "a folder that the group can write to": (lambda package: package.parent.chmod(0o775), False),
}


def _compiled(package, name):
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / (name or "x")).touch()
    return package / "__pycache__" / (name or "x")


@pytest.mark.parametrize("what", SPOILT)
def test_no_module_is_imported_that_others_can_change(tmp_path, what):
    spoil, found = SPOILT[what]
    package = tmp_path / "any_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "module.py").touch()
    spoil(package)
    finder = trust.Finder(set())
    assert finder.find_spec("none", [str(tmp_path)]) is None
    for name, folder, good in (("any_package", tmp_path, found), ("any_package.module", package, what == "nothing")):
        with nullcontext() if good else pytest.raises(ImportError, match="can be changed by others than root"):
            assert finder.find_spec(name, [str(folder)]) is not None


@pytest.fixture
def judged(monkeypatch):
    """What the rule says of each path to the user NOBODY, "" if it is trusted."""

    def judge(*paths):
        said = []
        with monkeypatch.context() as patch:
            patch.setattr(trust, "as_root", lambda: False)
            patch.setattr(os, "geteuid", lambda: NOBODY)
            for path in paths:
                try:
                    assert trust.require(str(path), ValueError) == os.path.realpath(path)
                    said.append("")
                except ValueError as error:
                    said.append(str(error))
        return said

    return judge


@pytest.fixture
def shared():
    """A directory that everybody may look into: pytest's own are root's alone."""
    with tempfile.TemporaryDirectory(prefix="nvrx-trust-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_user_trusts_files_of_the_user_and_of_root(shared, judged):
    roots, mine, other, open_ = (script(shared / name, "") for name in ("roots", "own", "other", "open"))
    give(mine, open_)
    os.chown(other, OTHER, -1)
    open_.chmod(0o666)
    (shared / "link").symlink_to(other)
    project = shared / "project"  # somebody else's, and its group may write
    project.mkdir()
    inside = script(project / "inside", "")
    inside.chmod(0o664)
    give(inside)
    os.chown(project, OTHER, -1)
    project.chmod(0o775)
    theirs = f"uid {OTHER}'s, neither ours nor root's; use a copy"
    said = judged(roots, mine, inside, project, other, shared / "link", open_, shared / "none")
    assert said[:4] == [""] * 4
    assert said[4].endswith(theirs) and said[5].endswith(theirs)
    assert said[6].endswith(f"everybody can change {open_}; correct its mode")
    assert "No such file" in said[7]
    assert all("can be changed by others than root" in refused(path) for path in (mine, inside, project, other, open_))
    assert trust.require(str(roots), UsageError) == str(roots)


# Becomes UID and makes a user namespace, whose map the test writes; prints the uid there, as_root() and the rule's
# sentence for each path. All modules are loaded before, because a user may not see their folder.
IN_NAMESPACE = """
import __future__, ctypes, fcntl, os, stat, sys, types
uid, rule = int(sys.argv[1]), open(sys.argv[2]).read()
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
print(flush=True)
sys.stdin.readline()
trust = types.ModuleType("trust")
exec(rule, vars(trust))
print(os.geteuid(), trust.as_root())
for path in sys.argv[3:]:
    try:
        assert trust.require(path, ValueError) == os.path.realpath(path)
        print()
    except ValueError as error:
        print(error)
"""


def in_namespace(map_, *paths, uid=NOBODY):
    """("euid as_root()", the rule's sentences for the paths) in a user namespace with the map `map_`."""
    rule = REPO / "nvrx_slurm/system/trust.py"
    argv = [sys.executable, "-c", IN_NAMESPACE, str(uid), str(rule), *map(str, paths)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes, text=True) as process:
        if not process.stdout.readline():
            pytest.skip(f"users have no user namespaces here: {process.stderr.read().strip()}")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{kind}").write_text(map_)
        out, err = process.communicate("go\n", timeout=WAIT_S)
    assert process.returncode == 0, err
    who, *said = out.splitlines()
    return who, said


USER = 61234
MAPS = {
    "root": (f"0 {USER} 1\n", "0 False"),  # enroot with its map to root
    "root of many": (f"0 {USER} 1\n1 100000 60000\n", "0 False"),  # rootless podman
}


@pytest.mark.parametrize("where", MAPS)
def test_in_a_users_namespace_the_hosts_root_is_root(shared, where):
    """There the files of root have the overflow uid; the user is not root, even with uid 0."""
    roots, mine, open_, writable = (script(shared / name, "") for name in ("roots", "own", "open", "in"))
    os.chown(mine, USER, -1)
    open_.chmod(0o666)
    map_, who = MAPS[where]
    assert in_namespace(map_, roots, mine, open_, uid=USER) == (
        who, ["", "", f"{open_} is not trusted, as everybody can change {open_}; correct its mode"],
    )  # fmt: skip
    os.chown(writable, 100000 + 5, -1)
    if where == "root of many":  # a user with a mapped uid is neither root nor this user
        assert in_namespace(map_, writable, uid=USER)[1][0].endswith("neither ours nor root's; use a copy")


@pytest.mark.parametrize("map_", ["0 0 1\n", "0 0 65534\n"])
def test_root_stays_root_in_a_namespace_with_the_hosts_root(shared, map_):
    """A file with the overflow uid belongs to some user of the host there."""
    roots, other = script(shared / "roots", ""), script(shared / "other", "")
    os.chown(other, 70000, -1)
    who, said = in_namespace(map_, roots, other, uid=0)
    assert (who, said[0]) == ("0 True", "")
    assert said[1].endswith(f"{other} can be changed by others than root; correct owner and mode")


@pytest.fixture
def trapped(tmp_path):
    """A link through /proc/PID/root, where a user can mount anything, to a script of root; the file that it writes."""
    mark = tmp_path / "ran"
    own = script(tmp_path / "own.sh", f"echo ran >{mark}; exit 1")
    (tmp_path / "check").symlink_to(f"/proc/{os.getpid()}/root{own}")
    return tmp_path / "check", mark


@pytest.mark.parametrize("shell", [[], ["/bin/sh"]], ids=["a program", "an argument"])
def test_root_runs_nothing_of_a_users_namespace(hooks, trapped, shell):
    check, mark = trapped
    run = [*shell, str(check)]
    hooks.site(own=[{"name": "mine", "run": run, "when": ["prolog"], "on_fail": "drain"}])
    ran = hooks.run("prolog")
    assert not mark.exists()
    assert (ran.code, hooks.asked()) == (0, []) and "is not trusted by root" in ran.log


@pytest.mark.parametrize("setting", ["CONFIG", "SCONTROL", "PYTHON", "PACKAGE"])
def test_no_setting_leads_there(hooks, trapped, setting):
    check, mark = trapped
    hooks.break_lustre()
    hooks.install(**{setting: check})
    hooks.sh("prolog")
    assert not mark.exists()
