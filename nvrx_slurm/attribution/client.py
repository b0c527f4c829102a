"""Asks an attribution service that runs elsewhere. Everything about it may fail; then it is left alone for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.attribution.records import Answer, AttributionSpec, CycleNews
from nvrx_slurm.attribution.web import Trouble, Web, json_object

_REQUEST_S, _AT_ONCE = 10.0, 4
_FIRST_POLL_S, _POLL_S = 0.25, 2.0  # doubles
_ANSWER_WITHIN_S = 600.0  # per cycle
_FAILURES = 3  # in a row; then the circuit is broken
_PAUSE_S, _MAX_PAUSE_S = 30.0, 600.0
_ACTIONS = ("STOP", "RESTART", "CONTINUE", "UNKNOWN", "TIMEOUT")
_RUNNING = ("pending", "in_flight")
_REFUSALS = 5  # of a log that has not come to the file system yet


class Client:
    """Submits the log of every cycle, and asks for the answer where the cycle failed. A few requests at a time."""

    def __init__(self, spec: AttributionSpec, say: Callable[[str], None], ending: asyncio.Event) -> None:
        self._spec, self._say, self._ending = spec, say, ending
        self._web = Web(spec.endpoint)
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._order: dict[int, asyncio.Lock] = {}  # by cycle: its end is told after its beginning
        self._failures, self._pause_s, self._broken_until_s = 0, _PAUSE_S, 0.0
        self._now = asyncio.get_running_loop().time

    async def answer(self, news: CycleNews) -> Answer:
        """What the service says; raises Trouble where it says nothing in time, or is left alone when the job ends."""
        until_s = self._now() + _ANSWER_WITHIN_S  # no cancellation: before Python 3.12 wait_for can lose one
        about = {"log_path": news.log, "cycle_id": news.cycle, "user": self._spec.user, "job_id": self._spec.job_id}
        about["analysis_intent"] = "terminal" if news.over else "progressive"
        async with self._order.setdefault(news.cycle, asyncio.Lock()):
            await self._ask(news, until_s, "POST", json={name: value for name, value in about.items() if value != ""})
        if news.over:
            self._order.pop(news.cycle, None)
        pause_s = _FIRST_POLL_S
        while news.fault:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
            reply = await self._ask(news, until_s, "GET", params={"log_path": news.log, "wait": "false"})
            if (answer := _answer_in(reply)) is not None:
                return answer
        return Answer()

    async def _ask(self, news: CycleNews, until_s: float, method: str, **what: Any) -> dict[str, Any]:
        """The reply, after as many requests as it takes: a log may come to the file system after its news."""
        refusals = 0
        while (left_s := until_s - self._now()) > 0:
            if (broken_s := self._broken_until_s - self._now()) > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), min(broken_s, left_s))
                    raise Trouble("the job has ended")
                continue
            try:
                async with self._turn:
                    return await self._request(method, **what)
            except Trouble as trouble:
                refusals += trouble.is_refusal
                if refusals >= _REFUSALS or not news.over:
                    raise
                await asyncio.sleep(trouble.retry_after_s or min(_FIRST_POLL_S * 2**refusals, _POLL_S))
        raise Trouble(f"no answer within {_ANSWER_WITHIN_S:g} s")

    async def _request(self, method: str, **what: Any) -> dict[str, Any]:
        try:
            reply = json_object(await self._web.ask(method, "/logs", _REQUEST_S, **what))
        except Trouble as trouble:
            if not trouble.is_refusal:
                self._on_failure(trouble)
            raise
        self._failures, self._pause_s = 0, _PAUSE_S
        return reply

    def _on_failure(self, trouble: Trouble) -> None:
        self._failures += 1
        if self._failures < _FAILURES:
            return
        if self._pause_s == _PAUSE_S:
            self._say(f"the attribution service {self._spec.endpoint} gives no answers ({trouble}); it is asked"
                      " again later, and the training goes on")  # fmt: skip
        self._broken_until_s = self._now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)


def _answer_in(reply: Mapping[str, Any]) -> Answer | None:
    """The answer in a reply to GET /logs; None while the service is still at it."""
    status, said = str(reply.get("status", "completed")).lower(), reply.get("recommendation")
    if status in _RUNNING:
        return None
    if status != "completed" or not isinstance(said, Mapping):
        return Answer(reason="the analysis failed" if status == "failed" else "")
    action = str(said.get("action", "")).strip().upper().replace(" ", "_")
    action = action if action in _ACTIONS else "UNKNOWN"
    return Answer(action, str(said.get("reason") or ""), str(said.get("source") or ""))
