"""Own checks of a site in the hooks: one that is broken, or not to be trusted, switches no other off."""

from __future__ import annotations

from pathlib import Path

import pytest
from hooks_harness import REPO, Hooks, as_root
from recorded import Node

pytestmark = pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")

MODULE = """
open({ran!r}, "a").close()
from nvrx_slurm.health.check import Check, Verdict
CHECK = Check("any", "nothing", "Always.", lambda *_: None, lambda *_: (Verdict.FAIL, "found by the module"))
"""


@pytest.fixture
def hooks(dgx: Node, tmp_path: Path) -> Hooks:
    return Hooks(tmp_path, dgx)


@pytest.mark.parametrize("hook", ["prolog", "epilog", "healthcheck"])
@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"run": "/nowhere/check"}, "mine: unknown: /nowhere/check cannot be used: No such file or directory"),
        ({"python": "no.such:CHECK"}, "mine: unknown: no.such:CHECK cannot be imported"),
    ],
)
def test_a_sick_node_is_drained_beside_a_check_that_cannot_be_run(
    hooks: Hooks, own: dict[str, object], said: str, hook: str
) -> None:
    hooks.site(own=[{"name": "mine", **own}])
    hooks.break_lustre()
    ran = hooks.run(hook, SLURM_JOB_EXIT_CODE2="1:0")
    assert said in ran.log and "lustre: fail: " in ran.log, ran.log
    assert any("State=DRAIN Reason=nvrx:lustre:" in line for line in hooks.asked())
    assert ran.code == (1 if hook == "prolog" else 0)


def test_a_module_that_others_can_change_is_not_imported_and_the_others_are_looked_at(
    hooks: Hooks, tmp_path: Path
) -> None:
    ran, package = tmp_path / "ran", tmp_path / "package"
    package.mkdir(mode=0o755)
    (package / "nvrx_slurm").symlink_to(REPO / "nvrx_slurm")
    module = package / "site_checks.py"
    module.write_text(MODULE.format(ran=str(ran)))
    module.chmod(0o666)
    hooks.add(PACKAGE=package)
    hooks.site(own=[{"name": "mine", "python": "site_checks:CHECK"}])
    first = hooks.run("prolog")
    assert f"mine: unknown: site_checks:CHECK cannot be imported (ImportError: {module} is not trusted" in first.log
    assert "lustre" not in first.log and first.code == 0 and not ran.exists()
    module.chmod(0o644)
    second = hooks.run("prolog")
    assert "mine: fail: found by the module" in second.log and second.code == 1 and ran.exists()


def test_a_node_that_no_group_of_the_site_file_names_is_told(hooks: Hooks) -> None:
    hooks.site(groups={"others": {"nodes": "other[1-9]"}})
    for hook in ("prolog", "healthcheck"):
        assert "n1 is in none of the groups of " in hooks.run(hook).log
    hooks.site(groups={"ours": {"nodes": "n[1-9]"}})
    assert "none of the groups" not in hooks.run("prolog").log
