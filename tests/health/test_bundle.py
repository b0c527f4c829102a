"""The hooks and all that they need in one file: installed, run and trusted without anything but Python."""

import subprocess
import sys

import pytest
from hooks_harness import DRAIN, HOOKS, SLACK_S, made

from nvrx_slurm.health import bundle
from nvrx_slurm.system import trust

pytestmark = HOOKS

BARE = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
MAX_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "nvrx.pyz"
    assert bundle.write(str(path)) <= MAX_BYTES
    return path


def nvrx(file, *words):
    """`nvrx` of the bundle, with an empty environment and no site-packages."""
    return subprocess.run([BARE, "-I", "-S", file, *words], env={}, cwd="/", capture_output=True, text=True, timeout=60)


def test_a_hook_of_the_bundle_drains_a_node_within_its_budget(file, tmp_path, monkeypatch):
    hooks = made(tmp_path, monkeypatch)
    told = nvrx(file, "health", "install", str(tmp_path / "hooks"))
    assert told.returncode == 0, told.stderr
    assert f"PYTHON={BARE}\nPACKAGE={file}\n" in (tmp_path / "hooks/hooks.conf").read_text()
    hooks.install(PYTHON=BARE, PACKAGE=file)
    assert "hooks.conf was there" in nvrx(file, "health", "install", str(tmp_path / "hooks")).stdout
    well = hooks.sh("prolog")
    assert well.code == 0 and "n1 job 7: pass" in well.log
    hooks.break_lustre()
    ran = hooks.sh("prolog")
    assert (ran.code, hooks.updates()) == (1, [DRAIN])
    assert max(ran.took_s, well.took_s) < 6 + SLACK_S
    file.chmod(0o777)
    assert "others than root can change" in hooks.version().stderr
    with pytest.raises(ImportError, match=r"nvrx\.pyz can be changed by others"):
        trust.Finder(set()).find_spec("yaml", [str(file)])
    file.chmod(0o755)
    assert trust.Finder(set()).find_spec("yaml", [str(file)])


def test_the_commands_of_a_bundle_need_nothing_else(file):
    refused = nvrx(file, "health", "install", "/dev/null/hooks")
    assert refused.returncode == 2 and "/dev/null/hooks/prolog cannot be written" in refused.stderr
    assert nvrx(file, "health", "run", "--only", "memory-size").returncode == 0
    assert '"hooks"' in nvrx(file, "doctor", "--json").stdout
