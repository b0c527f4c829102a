"""The site file (docs/reference/health-checks.md): expectations of nodes, rules of checks, checks of the site.

As strict as the other files: an unknown key is an error with a suggestion. Names of checks and settings belong to
`health` and are passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config.files import read_document
from nvrx_slurm.config.kinds import Kind
from nvrx_slurm.errors import UsageError

FLAG = "--config"
MAX_BUDGET_S = 3600.0


KINDS: dict[str, Kind] = {
    "count": k.integer(0),
    "number": k.real(),
    "percent": k.real(high=100.0, unit="percent"),
    "seconds": k.real(high=1e7, unit="seconds", metavar="SECONDS"),
    "text": k.TEXT,
    "bool": k.BOOL,
    "unix-socket": k.UNIX_SOCKET,
    "names": k.list_of(k.TEXT, "names"),
    "counts": k.list_of(k.integer(0), "whole numbers"),
    "paths": k.list_of(k.ABSOLUTE_PATH, "absolute paths"),
}


# Keys of a rule, and the fields of `health.check.Check` that they replace.
_RULE_KEYS = {
    "when": "contexts",
    "on_fail": "on_fail",
    "on_unknown": "on_unknown",
    "budget": "budget_s",
}
Rule = Mapping[str, Any]  # by those fields


class SiteCheck(NamedTuple):
    """A check of the site: the words of a command."""

    name: str
    run: tuple[str, ...]
    rule: Rule


class Group(NamedTuple):
    """Expectations and rules for some nodes; `nodes` is a host list of Slurm's."""

    name: str
    nodes: str
    expect: Mapping[str, object]
    checks: Mapping[str, Rule]


class Site(NamedTuple):
    """A site file, read; `expect` is checked by `expected` as soon as all settings are known. `hooks`: what it says of
    `health.policy.HookSettings`."""

    expect: Mapping[str, object]
    checks: Mapping[str, Rule]
    groups: tuple[Group, ...]
    own: tuple[SiteCheck, ...]
    deadlines: Mapping[str, float]
    hooks: Mapping[str, Any]


def load(path: str, contexts: Sequence[str], actions: Sequence[str]) -> Site:
    """The site file at `path`. Raises UsageError that names file, key and what to do."""
    document = read_document(path, FLAG)
    top = _mapping(document, path, ("expect", "checks", "groups", "own", "deadlines", "hooks"))
    own = top.get("own") or ()
    if not isinstance(own, (list, tuple)):
        raise UsageError(f"{path}: own must be a list; begin each of its entries with a dash")
    when = k.list_of(k.choice(*contexts), "contexts")
    action = k.choice(*actions)
    kinds = {"when": when, "on_fail": action, "on_unknown": action, "budget": _BUDGET}
    return Site(
        expect=_mapping(top.get("expect"), f"{path}: expect"),
        checks=_rules(top.get("checks"), kinds, f"{path}: checks"),
        groups=tuple(
            _group(name, raw, kinds, f"{path}: groups.{name}")
            for name, raw in _mapping(top.get("groups"), f"{path}: groups").items()
        ),
        own=tuple(_own(raw, kinds, f"{path}: own[{at}]") for at, raw in enumerate(own)),
        deadlines=typed(
            top.get("deadlines"), dict.fromkeys(contexts, _BUDGET), f"{path}: deadlines"
        ),
        hooks=typed(top.get("hooks"), _HOOK_KINDS, f"{path}: hooks"),
    )


def expected(raw: Mapping[str, object], kinds: Mapping[str, str], where: str) -> dict[str, Any]:
    """The values of an `expect:` mapping. `kinds`: the kind (a word of KINDS) of each setting there is."""
    return typed(raw, {name: KINDS[kind] for name, kind in kinds.items()}, where)


_BUDGET = k.real(high=MAX_BUDGET_S, above=True, unit="seconds")


def _rule(raw: object, kinds: Mapping[str, Kind], where: str) -> Rule:
    return {_RULE_KEYS[key]: value for key, value in typed(raw, kinds, where).items()}


def _rules(raw: object, kinds: Mapping[str, Kind], where: str) -> dict[str, Rule]:
    return {
        name: _rule(rule, kinds, f"{where}.{name}") for name, rule in _mapping(raw, where).items()
    }


def _group(name: str, raw: object, kinds: Mapping[str, Kind], where: str) -> Group:
    given = _mapping(raw, where, ("nodes", "expect", "checks"))
    if "nodes" not in given:
        raise UsageError(f"{where} has no nodes; add a host list such as nodes: dgx[01-32]")
    return Group(
        name=name,
        nodes=str(_value(k.TEXT, given["nodes"], f"{where}.nodes")),
        expect=_mapping(given.get("expect"), f"{where}.expect"),
        checks=_rules(given.get("checks"), kinds, f"{where}.checks"),
    )


_HOOK_KINDS = {
    "allow_skip": k.list_of(k.TEXT, "names of checks"),
    "kill_gpu_processes": k.BOOL,
    "undrain": k.BOOL,
}


def typed(raw: object, kinds: Mapping[str, Kind], where: str) -> dict[str, Any]:
    """A mapping with these keys and kinds of values; {} for None. `where` begins the sentence of a UsageError."""
    return {
        key: _value(kinds[key], value, f"{where}.{key}")
        for key, value in _mapping(raw, where, kinds).items()
    }


_NAME = k.matching(
    "NAME",
    r"[a-z0-9]+(-[a-z0-9]+)*",
    "must be lower-case words joined by dashes, for example nvme-raid",
)


def _own(raw: object, kinds: Mapping[str, Kind], where: str) -> SiteCheck:
    given = _mapping(raw, where, ("name", "run", *_RULE_KEYS))
    if "name" not in given or "run" not in given:
        raise UsageError(f"{where} must have a name and run (a command)")
    name = _value(_NAME, given.pop("name"), f"{where}.name")
    run = tuple(_value(k.WORDS, given.pop("run"), f"{where}.run"))
    return SiteCheck(name, run, _rule(given, kinds, where))


def _mapping(raw: object, where: str, known: Collection[str] | None = None) -> dict[str, object]:
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise UsageError(
            f"{where} must be a mapping of names to values, not {type(raw).__name__}; indent its keys"
        )
    for key in raw:
        if known is not None and key not in known:
            hint = k.did_you_mean(str(key), known) or f"; known: {', '.join(list(known)[:40])}"
            raise UsageError(f"{where}: {str(key)[:80]!r} is not a key{hint}")
        if not isinstance(key, str):
            raise UsageError(f"{where}: the key {key!r} must be text; put it in quotes")
    return dict(raw)


def _value(kind: Kind, raw: object, where: str) -> Any:
    try:
        return kind.parse(raw)
    except ValueError as error:
        raise UsageError(f"{where} {error}, not {k.shorten(raw)}") from None
