"""Tells people what happens to the job where they look already: at a URL, and in the Comment of the Slurm job.

It is told by the content of status.json. A receiver that hangs costs a thread, and the end of the job at most _END_S.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm.core.coordinator.status import JobLabels
from nvrx_slurm.core.needs import needs_a_person
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.output.result import BackgroundWrites

_POST_S, _END_S = 4.0, 4.0
_AGAIN_S = 60.0  # before the same kind of news, or the comment, is told anew
_SIGNALLED = 128  # an exit code above tells of a signal: a person, or Slurm, has ended the job


class Announcer:
    """Posts news to `url` as JSON; `comment(text)` sets the job's Comment. None: not wanted. `began`: Unix seconds."""

    def __init__(
        self,
        labels: JobLabels,
        began: float,
        url: str | None,
        comment: Callable[[str], None] | None,
        say: Callable[[str], None],
    ) -> None:
        self._labels, self._began, self._url, self._comment = labels, began, url or "", comment
        self._loop = asyncio.get_running_loop()
        self._calls = BackgroundWrites(once(say), "reach")
        self._told: dict[str, tuple[str, float]] = {}  # by kind: what was told last, and when

    def tell(self, found: dict[str, Any]) -> None:
        """Tell what is new in this content of status.json."""
        now = self._loop.time()
        for kind, text in _news(found, self._began) if self._url else ():
            if self._is_new(kind, text, now):
                body = _body(kind, f"nvrx job {self._labels.job} {self._labels.name}: {text}", found)
                self._calls.begin(Path(self._url.split("/")[2]), partial(post, self._url, body))
        text, at = comment_of(found), math.inf if found["end"] else now
        if self._comment is not None and self._is_new("comment", text, at):
            self._calls.begin(Path("Slurm"), partial(self._comment, text))

    def _is_new(self, kind: str, text: str, at: float) -> bool:
        last, when = self._told.get(kind, ("", -math.inf))
        if text == last or at < when + _AGAIN_S:
            return False
        self._told[kind] = text, at
        return True

    async def close(self) -> None:
        """Tell the rest, bounded."""
        await self._calls.close(_END_S)


def comment_of(found: dict[str, Any]) -> str:
    """For the job's Comment, which squeue shows to each user: no path, no name and no text of an exception."""
    used, end = found["restarts"]["used"], found["end"]
    state = f"ended with code {end['code']}" if end else f"cycle {max(0, found['cycle'])}"
    return f"nvrx {state}, {used} restart{'s' * (used != 1)}"


def _news(found: dict[str, Any], began: float) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of all that people want to hear; the same content gives the same news."""
    restarts, last, end = found["restarts"], found["incidents"][-1:], found["end"]
    for one in last:
        if one["done"] == "restarted" and one["time"] > began - 1.0:  # an earlier coordinator has told of earlier ones
            yield "restart", f"restart {restarts['used']} of {restarts['allowed']}: {one['cause']}"
    if end is None:
        yield from needs_a_person(found, found["written"] - found["since"]).items()
    elif 0 < end["code"] < _SIGNALLED:
        yield "give-up", f"gives up with code {end['code']}: {end['reason']}"


def _body(kind: str, text: str, found: dict[str, Any]) -> bytes:
    told = {name: found[name] for name in ("written", "job", "state", "cycle", "restarts", "end")}
    return json.dumps({"event": kind, "text": text, **told}).encode()


def post(url: str, body: bytes, headers: Mapping[str, str] | None = None, within_s: float = _POST_S) -> None:
    """POST JSON; in a thread. `within_s`: longest wait for a part of the answer (seconds). Raises OSError."""
    from http.client import HTTPException  # 0.1 s to import
    from urllib.request import Request, urlopen

    request = Request(url, body, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urlopen(request, timeout=within_s):
            pass
    except HTTPException as error:
        raise OSError(f"no HTTP: {error!r:.100}") from None
