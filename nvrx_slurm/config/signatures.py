"""The rules of a site: a YAML file that extends the table of `core.attribution.signatures`, checked at the start.

Texts are literals with `*` for anything, never regular expressions: a line takes time that grows with its length only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from nvrx_slurm.config.files import read_document
from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature
from nvrx_slurm.errors import UsageError
from nvrx_slurm.types import Blame, Confidence, LineRole, Remedy

FLAG = "--ft-signatures"
_MOST, _MOST_TEXTS, _TEXT_CHARS, _ADVICE_CHARS = 200, 20, range(4, 201), 200
_NAME = re.compile(r"[a-z][a-z0-9-]{1,39}")
_DEFAULTS = {
    "class": "site",
    "role": "cause",
    "blame": "unknown",
    "confidence": "likely",
    "action": "restart",
}
_KEYS = {"name", "texts", "advice", "where", *_DEFAULTS}
_E = TypeVar("_E", bound=Enum)


def read_signatures(path: str) -> tuple[Signature, ...]:
    """The rules of a file. Raises UsageError that names file, rule and what is wrong."""
    document = read_document(path, FLAG)
    rules = document.get("signatures") if isinstance(document, Mapping) else None
    if not isinstance(rules, list) or not 0 < len(rules) <= _MOST:
        raise UsageError(f"{path} must hold `signatures:` and 1 to {_MOST} rules")
    taken = {signature.name for signature in SIGNATURES}
    found = []
    for number, rule in enumerate(rules, 1):
        try:
            found.append(_signature(rule))
            if found[-1].name in taken:
                raise ValueError(f"name {found[-1].name} is taken; choose another one")
            taken.add(found[-1].name)
        except ValueError as error:
            raise UsageError(f"{path}: rule {number}: {error}") from None
    return tuple(found)


def _signature(rule: object) -> Signature:
    if not isinstance(rule, Mapping) or not _KEYS.issuperset(rule):
        raise ValueError(f"must be a mapping with some of {', '.join(sorted(_KEYS))}")
    plain: dict[str, Any] = {**_DEFAULTS, "advice": "", "where": "output", **rule}
    name, topic = str(plain.get("name")), str(plain["class"])
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(topic)):
        raise ValueError(
            "name and class are lower-case letters, digits and hyphens, 2 to 40 of them"
        )
    texts, advice = plain.get("texts"), str(plain["advice"])
    if (
        not isinstance(texts, list)
        or not 0 < len(texts) <= _MOST_TEXTS
        or not all(map(_is_text, texts))
    ):
        raise ValueError(
            f"texts are 1 to {_MOST_TEXTS} lines of 4 to 200 characters that begin with 4 without *"
        )
    if len(advice) > _ADVICE_CHARS or not advice.isprintable():
        raise ValueError(f"advice is one line of at most {_ADVICE_CHARS} characters")
    if plain["where"] not in ("output", "exception"):
        raise ValueError("where is output or exception")
    return Signature(
        name,
        topic,
        tuple(text.lower() for text in texts),
        _one_of(LineRole, plain["role"], "role"),
        _one_of(Blame, plain["blame"], "blame"),
        _one_of(Confidence, plain["confidence"], "confidence"),
        _one_of(Remedy, plain["action"], "action"),
        advice,
        printed=plain["where"] == "output",
    )


def _is_text(text: object) -> bool:
    """Whether it can be searched for: its beginning is what is looked up."""
    return (
        isinstance(text, str)
        and len(text) in _TEXT_CHARS
        and text.isprintable()
        and len(text.split("*")[0]) >= 4
    )


def _one_of(kind: type[_E], value: object, key: str) -> _E:
    values: Iterable[_E] = kind
    for member in values:
        if member.value == value:
            return member
    raise ValueError(
        f"{key} is one of {', '.join(str(member.value) for member in kind)}, not {value!r}"
    )
