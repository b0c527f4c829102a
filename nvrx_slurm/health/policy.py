"""Which checks run here and now, what is expected of this node, what a failure does: code, then site, then flags."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import registry
from nvrx_slurm.health.check import ACTIONS, CONTEXTS, Check
from nvrx_slurm.system import trust

if TYPE_CHECKING:
    from nvrx_slurm.config.site import Group

DEFAULT_CONFIG = "/etc/nvrx/health.yaml"
MAX_DEADLINE_S = 3600.0
LEFTOVERS = "gpu-leftovers"  # the epilog's own check, in reasons of drains
# Slurm says "Prolog hung" after 8 s and kills a HealthCheckProgram after 60 s (slurm.conf(5)).
DEADLINES_S = {"prolog": 6.0, "epilog": 20.0, "periodic": 50.0, "preflight": 5.0, "manual": 30.0}


class Selection(NamedTuple):
    """What to run: `checks` with the site's rules applied; `watched`: those that the check server repeats. `notes`:
    sentences worth saying once."""

    node: str
    when: str
    checks: list[Check]
    expected: dict[str, Any]
    deadline_s: float
    notes: tuple[str, ...] = ()
    watched: Sequence[Check] = ()


class HookSettings(NamedTuple):
    """What Slurm's hooks may do. `allow_skip`: checks that a job may skip, or "all"."""

    allow_skip: tuple[str, ...] = ()
    kill_gpu_processes: bool = True
    undrain: bool = True


class Rules(NamedTuple):
    """All checks as they are on this node, whatever the context."""

    node: str
    checks: dict[str, Check]
    expected: dict[str, Any]
    deadlines_s: dict[str, float]
    hooks: HookSettings = HookSettings()
    notes: tuple[str, ...] = ()


def select(
    when: str,
    *,
    only: Sequence[str] = (),
    include: Sequence[str] = (),
    skip: Sequence[str] = (),
    watch: Sequence[str] = (),
    config: str | None = None,
    sysroot: str = "/",
    node: str = "",
    expect: Mapping[str, object] | None = None,
    deadline_s: float | None = None,
) -> Selection:
    """The checks of a context and those of `include`, or exactly those of `only`; less those of `skip`.

    `config`: None = DEFAULT_CONFIG below `sysroot` if it is there. `node`: default: Slurm's name of this one.
    `expect`: values that go over the site's, by name of the setting, typed or as text. Raises UsageError.
    """
    if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:
        raise UsageError(
            f"--deadline {deadline_s:g}: must be seconds > 0 and <= {MAX_DEADLINE_S:g}"
        )
    rules = read_rules(config, sysroot, node, expect, may_do_without=when == "preflight")
    for flag, names in (
        ("--only", only),
        ("--include", include),
        ("--skip", skip),
        ("--watch", watch),
    ):
        registry.require_known(names, rules.checks, flag)
    chosen = [
        check
        for check in rules.checks.values()
        if (check.name in only if only else when in check.contexts or check.name in include)
        and check.name not in skip
    ]
    watched = [rules.checks[name] for name in dict.fromkeys(watch)]
    deadline_s = deadline_s or rules.deadlines_s[when]
    return Selection(rules.node, when, chosen, rules.expected, deadline_s, rules.notes, watched)


def read_rules(
    config: str | None = None,
    sysroot: str = "/",
    node: str = "",
    expect: Mapping[str, object] | None = None,
    may_do_without: bool = False,
) -> Rules:
    """Built-in and own checks with what the site says about them on `node`. Raises UsageError.

    `may_do_without`: a default site file that this user may not read or trust is only a note; a job's user cannot
    mend it.
    """
    if not os.path.isdir(sysroot):
        raise UsageError(f"--sysroot {sysroot}: there is no such directory; correct it")
    name = node or node_name()
    checks = registry.built_in()
    default = os.path.abspath(sysroot).rstrip("/") + DEFAULT_CONFIG
    path = config or (default if os.path.lexists(default) else "")
    rules = Rules(name, checks, registry.defaults(checks.values()), dict(DEADLINES_S))
    if path and may_do_without and not config and (why := _unusable(path)):
        rules = rules._replace(notes=(f"{why}: nothing is known of what this node should have",))
    elif path:
        rules = _with_site(path, name, checks)
    if expect:
        rules.expected.update(_parsed(expect, rules.checks, "--expect"))
    return rules


def node_name() -> str:
    """Slurm's name of this node in prologs and tasks, else the short host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def _unusable(path: str) -> str:
    """Reason why this user cannot use a site file, "" if there is none."""
    try:
        trust.require(path, UsageError)
    except UsageError as error:
        return str(error)
    return "" if os.access(path, os.R_OK) else f"{path} may not be read by uid {os.geteuid()}"


def _with_site(path: str, node: str, checks: dict[str, Check]) -> Rules:
    # Only here, since reading YAML and its values costs more than all checks of a healthy node.
    from nvrx_slurm.config import site as site_file
    from nvrx_slurm.config.site import Group
    from nvrx_slurm.health.checks import site_checks

    site = site_file.load(trust.require(path, UsageError), CONTEXTS, ACTIONS)
    everything = {**checks}
    for one in site.own:
        if one.name in (*everything, LEFTOVERS):
            raise UsageError(
                f"{path}: own: there is a check called {one.name} already; choose another name"
            )
        everything[one.name] = site_checks.check(one, path)._replace(**one.rule)
    expected = registry.defaults(everything.values())
    ours = 0
    # the first one: of all nodes
    for group in (Group("", node, site.expect, site.checks), *site.groups):
        where = f"{path}: groups.{group.name}." if group.name else f"{path}: "
        # also of other nodes: mistakes are told early
        values = _parsed(group.expect, everything, f"{where}expect")
        registry.require_known(group.checks, everything, f"{where}checks")
        if node in _nodes_of(group, where):
            ours += 1
            expected |= values
            everything |= {
                name: everything[name]._replace(**rule) for name, rule in group.checks.items()
            }
    allowed = HookSettings(**site.hooks)
    registry.require_known(allowed.allow_skip, (*everything, "all"), f"{path}: hooks.allow_skip")
    notes = () if ours > 1 or not site.groups else (f"{node} is in none of the groups of {path}",)
    return Rules(node, everything, expected, {**DEADLINES_S, **site.deadlines}, allowed, notes)


def _nodes_of(group: Group, where: str) -> list[str]:
    from nvrx_slurm.slurm.nodelist import expand

    try:
        names = expand(group.nodes)
    except UsageError as error:
        raise UsageError(f"{where}nodes: {error}") from None
    if not names:
        raise UsageError(f"{where}nodes names no node; add a host list or remove it")
    return names


def _parsed(raw: Mapping[str, object], checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    from nvrx_slurm.config.site import expected

    kinds = {setting.name: setting.kind for setting in registry.settings(checks.values()).values()}
    return expected(raw, kinds, where)


def assignments(words: Iterable[str]) -> dict[str, object]:
    """["cpus=64"] as {"cpus": "64"}. Raises UsageError."""
    found: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--expect {word}: must be NAME=VALUE, for example --expect cpus=64")
        found[name.strip()] = value
    return found
