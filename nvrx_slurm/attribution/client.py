"""Asks an attribution service that runs elsewhere. Where it fails, it is asked again, ever more rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.attribution.records import AttributionSpec, CycleNews, Recommendation
from nvrx_slurm.attribution.web import Trouble, Web, json_object

_REQUEST_S, _AT_ONCE = 10.0, 4
_FIRST_POLL_S, _POLL_S = 0.25, 2.0  # doubles
_LONGEST_PAUSE_S = 60.0  # after a failure; doubles, too
_ANSWER_WITHIN_S = 600.0  # per cycle
_FAILURES = 3  # in a row; then the service is down
_ACTIONS = ("STOP", "RESTART", "CONTINUE", "UNKNOWN", "TIMEOUT")
_RUNNING = ("pending", "in_flight")
_REFUSALS = 5  # of a log that has not come to the file system yet


class Client:
    """Submits the log of every cycle, and asks for the answer where the cycle failed. A few requests at a time."""

    def __init__(self, spec: AttributionSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._web = Web(spec.endpoint)
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._order: dict[int, asyncio.Lock] = {}  # by cycle: its end is told after its beginning
        self._failures = 0  # in a row
        self._now = asyncio.get_running_loop().time

    @property
    def is_down(self) -> bool:
        """Whether the service has not answered for a while."""
        return self._failures >= _FAILURES

    async def answer(self, news: CycleNews) -> Recommendation:
        """What the service says. Raises Trouble where it says nothing in time."""
        # no cancellation: before Python 3.12 wait_for can lose one
        until_s = self._now() + _ANSWER_WITHIN_S
        about = {
            "log_path": news.log,
            "cycle_id": news.cycle,
            "user": self._spec.user,
            "job_id": self._spec.job_id,
        }
        about["analysis_intent"] = "terminal" if news.over else "progressive"
        async with self._order.setdefault(news.cycle, asyncio.Lock()):
            await self._ask(
                news,
                until_s,
                "POST",
                json={name: value for name, value in about.items() if value != ""},
            )
        if news.over:
            self._order.pop(news.cycle, None)
        pause_s = _FIRST_POLL_S
        while news.fault:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)
            reply = await self._ask(
                news, until_s, "GET", params={"log_path": news.log, "wait": "false"}
            )
            if (answer := _answer_in(reply)) is not None:
                return answer
            if self._now() > until_s:
                raise Trouble(f"no answer within {_ANSWER_WITHIN_S:g} s")
        return Recommendation()

    async def _ask(
        self, news: CycleNews, until_s: float, method: str, **what: Any
    ) -> dict[str, Any]:
        """The reply, after as many requests as it takes: a log may come to the file system after its news."""
        refusals, pause_s = 0, _FIRST_POLL_S
        while True:
            try:
                async with self._turn:
                    reply = json_object(await self._web.ask(method, "/logs", _REQUEST_S, **what))
                self._failures = 0
                return reply
            except Trouble as trouble:
                refusals += trouble.is_refusal
                self._failures = 0 if trouble.is_refusal else self._failures + 1
                if self._failures == _FAILURES:
                    self._say(f"the attribution service {self._spec.endpoint} gives no answers ({trouble}); it is"
                              " asked again later, and the training goes on")  # fmt: skip
                if refusals >= _REFUSALS or not news.over or self._now() > until_s:
                    raise
                await asyncio.sleep(trouble.retry_after_s or pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _answer_in(reply: Mapping[str, Any]) -> Recommendation | None:
    """The answer in a reply to GET /logs; None while the service is still at it."""
    status, said = str(reply.get("status", "completed")).lower(), reply.get("recommendation")
    if status in _RUNNING:
        return None
    if status != "completed" or not isinstance(said, Mapping):
        return Recommendation(reason="the analysis failed" if status == "failed" else "")
    action = str(said.get("action", "")).strip().upper().replace(" ", "_")
    action = action if action in _ACTIONS else "UNKNOWN"
    return Recommendation(action, str(said.get("reason") or ""), str(said.get("source") or ""))
