"""For mkdocs: a fence of a tested example has words behind its language, which mkdocs would not take for a fence."""

from __future__ import annotations

import re
from typing import Any

_TESTED = re.compile(r"^(```\w+) .*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with plain fences."""
    return _TESTED.sub(r"\1", markdown)
