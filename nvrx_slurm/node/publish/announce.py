"""Tells people what happens to the job where they look already: at a URL, and in the Comment of the Slurm job."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from nvrx_slurm.core.needs import needs_a_person
from nvrx_slurm.node.output.writer import Writer
from nvrx_slurm.node.publish.publisher import View

_POST_S = 4.0
_END_S = 4.0
_AGAIN_S = 60.0  # before the same kind of news, or the comment, is told anew
_MOST_NEWS = 16  # most news that wait for a slow receiver
_SIGNALLED = 128  # an exit code above tells of a signal: a person, or Slurm, has ended the job


class Announcer:
    """A listener: posts news to `url` as JSON, each of them. `began`: Unix seconds."""

    def __init__(self, url: str, began: float, say: Callable[[str], None]) -> None:
        self._url = url
        self._began = began
        self._posts = Writer(say, "reach", _MOST_NEWS)
        self._told: dict[str, tuple[str, float]] = {}  # by kind: what was told last, and when

    def tell(self, view: View) -> None:
        """Post what is new in this view of an elected coordinator."""
        for kind, text in _news(view, self._began) if view["term"] > 0 else ():
            last, at = self._told.get(kind, ("", -math.inf))
            if text != last and view["written"] >= at + _AGAIN_S:
                self._told[kind] = text, view["written"]
                body = _body(kind, f"nvrx job {view['job']['job']} {view['job']['name']}: {text}", view)
                self._posts.put(self._url.split("/")[2], partial(post, self._url, body))

    async def close(self) -> None:
        """Tell the rest, bounded."""
        await self._posts.close(_END_S)


class Comment:
    """A listener: keeps the job's Comment, by `put(text)`."""

    def __init__(self, put: Callable[[str], None], say: Callable[[str], None]) -> None:
        self._put = put
        self._calls = Writer(say, "reach")
        self._last = ""
        self._next = -math.inf  # Unix seconds

    def tell(self, view: View) -> None:
        """Set what is new in this view of an elected coordinator; the end at once."""
        text = comment_of(view)
        if view["term"] > 0 and text != self._last and (view["end"] or view["written"] >= self._next):
            self._last = text
            self._next = view["written"] + _AGAIN_S
            self._calls.put("Slurm", partial(self._put, text))

    async def close(self) -> None:
        """Tell the rest, bounded."""
        await self._calls.close(_END_S)


def comment_of(found: View) -> str:
    """A text for the job's Comment, which squeue shows to each user: no path, no name and no text of an exception."""
    used = found["restarts"]["used"]
    end = found["end"]
    state = f"ended with code {end['code']}" if end else f"cycle {max(0, found['cycle'])}"
    return f"nvrx {state}, {used} restart{'s' * (used != 1)}"


def _news(found: View, began: float) -> Iterator[tuple[str, str]]:
    """(kind, sentence) of all that people want to hear; the same content gives the same news."""
    restarts, last, end = found["restarts"], found["incidents"][-1:], found["end"]
    for one in last:
        if one["done"] == "restarted" and one["time"] > began - 1.0:  # an earlier coordinator has told of earlier ones
            yield "restart", f"restart {restarts['used']} of {restarts['allowed']}: {one['cause']}"
    if end is None:
        yield from needs_a_person(found, found["written"] - found["since"]).items()
    elif 0 < end["code"] < _SIGNALLED:
        yield "give-up", f"gives up with code {end['code']}: {end['reason']}"


def _body(kind: str, text: str, found: View) -> bytes:
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
