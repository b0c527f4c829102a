"""Takes secrets and names out of text that leaves the cluster. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SECRETS = [re.compile(pattern) for pattern in (  # the first group stays
    r"()\b(?:hf_|sk-|xox[abprs]-|gh[pousr]_|github_pat_|wandb_v\d+_|glpat-|nvapi-|AKIA|ASIA)[\w-]{8,}",
    r"()\beyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?",
    r"()-----BEGIN [^-]{0,40}KEY-----[\s\S]*?(?:-----END|\Z)",
    # the end of a log may begin in the middle of a key
    r"()\A(?:(?!-----BEGIN)[\s\S])*?-----END [^-]{0,40}KEY-----",
    r"()(?<![\w+/])(?:[0-9a-fA-F]{32,}|[A-Za-z0-9+/]{50,}={0,2})(?![\w+/])",
    r"(?i)\b((?:authorization|cookie)['\"]?\s*[:=]\s*).*",
    r"(?i)\b(bearer\s+)\S+",
    r"(?i)\b([\w-]{0,40}(?:passw(?:or)?d|passphrase|secret|token|(?:api|access)[-_]?key)\w{0,40}['\"]?\s*[=:]\s*['\"]?)"
    r"[^\s'\",;&]+",
    r"(?i)\b((?:[\w-]{1,40}key|sig|[\w-]{0,40}signature|[\w-]{0,40}credential)['\"]?\s*[=:]\s*['\"]?)[^\s'\",;&]+",
    r"(?i)\b(wandb\s+login\s+)\S+",
    r"(?i)(--[\w-]{0,40}(?:passw(?:or)?d|passphrase|secret|token|key)['\"]?[\s,]+['\"]?)[^\s'\",;&-][^\s'\",;&]*",
    r"\b(\w{1,20}://)[^\s/@]*:[^\s/@]*(?=@)",
)]  # fmt: skip
_LINE_CHARS = 2000
_WORD = re.compile(r"[\w-]+")
_HOME = re.compile(r"(/(?:home|Users)/)[^/\s:'\"]+")
_IP = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F:]{1,19}(?![\w:])"
)


def without_secrets(text: str) -> str:
    """`text`, of each line at most 2,000 characters, with [secret] for what looks like a secret."""
    # patterns take quadratic time
    text = "\n".join(line[:_LINE_CHARS] for line in text.split("\n"))
    for pattern in _SECRETS:
        text = pattern.sub(r"\1[secret]", text)
    return text


class Redactor:
    """Names get aliases that are the same throughout, and can be turned back."""

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        self._alias: dict[str, str] = {}
        self._kind = {name.partition(".")[0]: "host" for name in hosts} | dict.fromkeys(
            users, "user"
        )

    def clean(self, text: str) -> str:
        """`text` without secrets, and with aliases."""
        text = _HOME.sub(r"\1[user]", without_secrets(text))
        text = _WORD.sub(lambda found: self._of(self._kind.get(found[0], ""), found[0]), text)
        return _IP.sub(lambda found: self._of("ip", found[0]), text)

    def restored(self, text: str) -> str:
        """`text` with the names for their aliases; secrets stay out."""
        back = {alias: name for name, alias in self._alias.items()}
        return re.sub(r"\b(?:host|user|ip)-\d+\b", lambda found: back.get(found[0], found[0]), text)

    def _of(self, kind: str, name: str) -> str:
        if not kind:
            return name
        return self._alias.setdefault(name, f"{kind}-{len(self._alias) + 1}")
