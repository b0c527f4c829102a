"""The rules of a site: a YAML file that extends the table of `core.attribution.signatures`, checked at the start.

Texts are literals with `*` for anything, never regular expressions: a line takes time that grows with its length only.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config.files import read_document
from nvrx_slurm.config.kinds import Kind
from nvrx_slurm.config.site import typed
from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature
from nvrx_slurm.errors import UsageError
from nvrx_slurm.types import Blame, Confidence, LineRole, Remedy

FLAG = "--ft-signatures"
_MOST, _MOST_TEXTS, _TEXT_CHARS, _ADVICE_CHARS = 200, 20, range(4, 201), 200
_DEFAULTS = {
    "class": "site",
    "role": LineRole.CAUSE,
    "blame": Blame.UNKNOWN,
    "confidence": Confidence.LIKELY,
    "action": Remedy.RESTART,
    "advice": "",
    "where": "output",
}


def read_signatures(path: str) -> tuple[Signature, ...]:
    """The rules of a file. Raises UsageError that names file, rule and what is wrong."""
    document = read_document(path, FLAG)
    rules = document.get("signatures") if isinstance(document, Mapping) else None
    if not isinstance(rules, list) or not 0 < len(rules) <= _MOST:
        raise UsageError(f"{path} must hold `signatures:` and 1 to {_MOST} rules")
    taken = {signature.name for signature in SIGNATURES}
    found = []
    for number, rule in enumerate(rules, 1):
        where = f"{path}: rule {number}"
        given: dict[str, Any] = _DEFAULTS | typed(rule, _KINDS, where)
        if not {"name", "texts"} <= given.keys():
            raise UsageError(f"{where} must have a name and texts")
        if given["name"] in taken:
            raise UsageError(f"{where}: name {given['name']} is taken; choose another one")
        taken.add(given["name"])
        signature = Signature(*(given[key] for key in _FIELDS))
        found.append(signature._replace(printed=given["where"] == "output"))
    return tuple(found)


def _texts(raw: object) -> tuple[str, ...]:
    """Each is searched for by its beginning."""
    if not isinstance(raw, list) or not 0 < len(raw) <= _MOST_TEXTS:
        raise ValueError(f"must be a list of 1 to {_MOST_TEXTS} lines")
    for text in map(k.as_text, raw):
        if len(text) not in _TEXT_CHARS or len(text.split("*")[0]) < 4:
            raise ValueError("must be lines of 4 to 200 characters that begin with 4 without *")
    return tuple(text.lower() for text in raw)


def _advice(raw: object) -> str:
    if not isinstance(raw, str) or len(raw) > _ADVICE_CHARS or not raw.isprintable():
        raise ValueError(f"must be one line of at most {_ADVICE_CHARS} characters")
    return raw


def _one_of(kind: type[Enum]) -> Kind:
    word = k.choice(*(member.value for member in kind))
    return word._replace(parse=lambda raw: kind(word.parse(raw)))


_NAME = k.matching(
    "NAME",
    r"[a-z][a-z0-9-]{1,39}",
    "must be lower-case letters, digits and hyphens, 2 to 40 of them",
)
# the keys of a rule; the first ones in the order of the fields of Signature
_KINDS: dict[str, Kind] = {
    "name": _NAME,
    "class": _NAME,
    "texts": Kind("LINES", _texts),
    "role": _one_of(LineRole),
    "blame": _one_of(Blame),
    "confidence": _one_of(Confidence),
    "action": _one_of(Remedy),
    "advice": Kind("LINE", _advice),
    "where": k.choice("output", "exception"),
}
_FIELDS = [*_KINDS][:-1]
