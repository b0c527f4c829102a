"""The site file: what it changes, where, and each way in which it can be wrong."""

import re
from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy, registry
from nvrx_slurm.health.check import CONTEXTS

pytestmark = pytest.mark.fast


def plan(bare, when="prolog", **more):
    return policy.select(when, sysroot=str(bare.root), node=more.pop("node", "dgx07"), **more)


def named(checks, name):
    (found,) = [check for check in checks if check.name == name]
    return found


def test_without_a_site_the_checks_speak_for_themselves(bare):
    found = plan(bare)
    assert [check.name for check in found.checks] == [
        check.name for check in registry.built_in().values() if "prolog" in check.contexts
    ]
    assert found.expected["cpus"] is None
    assert (found.deadline_s, found.notes) == (6.0, ())


def test_the_layers_of_a_site(bare):
    """Everybody, then each group that the node is in, in the order of the file; then --expect."""
    config = bare.site(
        expect={"cpus": 1, "memory_gb": 1, "shm_free_gb": 1},
        checks={"lustre": {"on_fail": "warn", "budget": 1}, "mounts": {"when": []}},
        groups={
            "others": {"nodes": "cpu[1-4]", "expect": {"cpus": 96}, "checks": {"lustre": {"when": []}}},
            "dgx": {"nodes": "cpu1,dgx[01-32]", "expect": {"cpus": 224, "memory_gb": 2000}},
            "new": {"nodes": "dgx07", "expect": {"memory_gb": 4000}, "checks": {"lustre": {"on_fail": "fail"}}},
        },
        deadlines={"prolog": 4},
    )
    found = plan(bare, config=config, expect={"shm_free_gb": "7.5"})
    assert [found.expected[key] for key in ("cpus", "memory_gb", "shm_free_gb")] == [224, 4000.0, 7.5]
    lustre = named(found.checks, "lustre")
    assert (lustre.on_fail, lustre.budget_s, found.deadline_s) == ("fail", 1.0, 4.0)
    assert "mounts" not in {check.name for check in found.checks}
    assert plan(bare, config=config, node="cpu1").expected["cpus"] == 224
    assert plan(bare, config=config, node="cpu2").expected["cpus"] == 96
    elsewhere = plan(bare, config=config, node="login")
    assert elsewhere.expected["cpus"] == 1
    assert elsewhere.notes == (f"login is in none of the groups of {config}",)


def test_only_and_skip(bare):
    only = plan(bare, "preflight", only=["time-sync", "lustre"], skip=["lustre"])
    assert [check.name for check in only.checks] == ["time-sync"], "--only takes checks of any context"
    assert "lustre" not in [check.name for check in plan(bare, "preflight", skip=["lustre"]).checks]


@pytest.mark.parametrize(
    "text, said",
    [
        ("expect: {cpu: 4}", "expect: 'cpu' is not a key; did you mean cpus?"),
        ("expect: {cpus: many}", "expect.cpus must be a whole number >= 0, not 'many'"),
        ("checks: {lustr: {}}", "checks: there is no check 'lustr'; did you mean lustre?"),
        ("checks: {lustre: {on_fail: reboot}}", "checks.lustre.on_fail must be drain or fail or warn, not 'reboot'"),
        ("checks: {lustre: {when: [epilogue]}}", "checks.lustre.when must be prolog or"),
        ("groups: {a: {nodes: 'n[1-'}}", "groups.a.nodes: host list 'n[1-'"),
        ("groups: {a: {nodes: '(null)'}}", "groups.a.nodes names no node"),
        ("hooks: {allow_skip: [all, lustr]}", "hooks.allow_skip: there is no check 'lustr'; did you mean lustre?"),
        ("own: [{name: lustre, run: /bin/true}]", "there is a check called lustre already"),
        ("own: [{name: x, run: bin/true}]", "own check x: run must begin with an absolute path"),
        ("own: [{name: gpu-leftovers, run: /bin/true}]", "there is a check called gpu-leftovers already"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_its_place(bare, text, said):
    file = bare / "/etc/nvrx/health.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode())
    with pytest.raises(UsageError) as error:
        plan(bare)
    sentence = str(error.value)
    assert said in sentence and str(file) in sentence
    assert "\n" not in sentence and len(sentence) < 600


def test_an_own_check_is_not_at_the_preflight_unless_the_site_says_so(bare):
    """It may need root, which a job has not; nor is the list of services a reason to leave a node out of a job."""
    own = [{"name": "mine", "run": "/bin/true"}, {"name": "theirs", "run": "/bin/true", "when": ["preflight"]}]
    config = bare.site(own=own, expect={"services": ["munge"]})
    at = {when: {check.name for check in plan(bare, when, config=config).checks} for when in CONTEXTS}
    assert "mine" not in at["preflight"] and "theirs" in at["preflight"] and "services" not in at["preflight"]
    assert all({"mine"} <= at[when] for when in CONTEXTS if when != "preflight")


@pytest.mark.parametrize(
    "more, said",
    [
        ({"only": ["mount"]}, "--only: there is no check 'mount'; did you mean mounts?"),
        ({"expect": {"cpu": 1}}, "--expect: 'cpu' is not a key; did you mean cpus?"),
        ({"deadline_s": 0.0}, "--deadline 0: must be seconds > 0"),
    ],
)
def test_wrong_arguments_are_told(bare, more, said):
    with pytest.raises(UsageError) as error:
        plan(bare, **more)
    assert said in str(error.value)


DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "health-checks.md"


def test_the_site_file_of_the_docs_is_one(tmp_path):
    from nvrx_slurm.config import site
    from nvrx_slurm.health.check import ACTIONS

    (text,) = re.findall(r"^```yaml\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    file = tmp_path / "health.yaml"
    file.write_text(text)
    found = site.load(str(file), CONTEXTS, ACTIONS)
    kinds = {name: setting.kind for name, setting in registry.settings(registry.built_in().values()).items()}
    for expect in (found.expect, found.groups[0].expect):
        assert site.expected(expect, kinds, "docs")
    registry.require_known([*found.checks, *found.groups[0].checks], registry.built_in(), "docs")
    assert [own.name for own in found.own] == ["nvme-raid"]


def test_every_check_is_in_the_docs():
    text = DOCS.read_text()
    assert [name for name in registry.built_in() if f"| `{name}` |" not in text] == []
