"""Asks an attribution service that runs elsewhere. Everything about it may fail; then it is left alone for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.attribution.answer import Answer, Tell, answer_in, one_line
from nvrx_slurm.attribution.settings import CycleNews, Settings
from nvrx_slurm.attribution.web import Reply, Trouble, Web

_log = logging.getLogger(__name__)
_REQUEST_S = 10.0
_FIRST_POLL_S, _POLL_S = 0.25, 2.0  # doubles
_PATIENCE_S = 600.0  # per cycle
_MOST_CYCLES = 64
_FAILURES = 3  # in a row; then the circuit is broken
_PAUSE_S, _MAX_PAUSE_S = 30.0, 600.0
_REFUSALS = 5  # of a log that has not come to the file system yet
_LATER = (408, 425, 429)


@dataclass
class _Item:
    news: CycleNews
    due_s: float
    until_s: float
    intent: str = "progressive"  # what to submit next; "" = submitted: ask for the answer; "-" = wait for its end
    refusals: int = 0
    pause_s: float = _FIRST_POLL_S


class Client:
    """Submits the log of every cycle, and asks for the answer where the cycle failed; newest first, one at a time."""

    def __init__(self, settings: Settings, tell: Tell, say: Callable[[str], None], web: Web) -> None:
        self._settings, self._tell, self._say, self._web = settings, tell, say, web
        self._items: dict[int, _Item] = {}
        self._wake = asyncio.Event()
        self._failures, self._pause_s, self._broken_until_s = 0, _PAUSE_S, 0.0
        self._now = asyncio.get_running_loop().time
        self._ending = self._said = False

    async def start(self) -> str:
        """Nothing is listened on."""
        return ""

    def hear(self, news: CycleNews) -> None:
        """A cycle runs, or is over."""
        intent = "terminal" if news.over else "progressive"
        self._items[news.cycle] = _Item(news, self._now(), self._now() + _PATIENCE_S, intent)
        while len(self._items) > _MOST_CYCLES:
            self._give_up(min(self._items), "too many cycles wait")
        self._wake.set()

    async def work(self) -> None:
        """For ever, or after `finish` until everything is submitted."""
        while not (self._ending and all(item.intent != "terminal" for item in self._items.values())):
            item = self._next()
            broken = self._now() < self._broken_until_s
            if broken and self._ending:
                return
            if item is None or broken:
                await self._sleep(item)
                continue
            try:
                await self._step(item)
                self._failures, self._pause_s = 0, _PAUSE_S
            except Trouble as trouble:
                self._on_trouble(item, trouble)

    async def finish(self) -> None:
        """The job has ended: submit what is not submitted yet."""
        self._ending = True
        self._wake.set()

    def _next(self) -> _Item | None:
        """Of those that are due the newest that is over; those that run come last."""
        now = self._now()
        for item in [item for item in self._items.values() if item.intent != "-" and now >= item.until_s]:
            self._give_up(item.news.cycle, f"no answer within {_PATIENCE_S:g} s")
        due = [item for item in self._items.values() if item.intent != "-" and item.due_s <= now]
        return max(due, key=lambda item: (item.intent != "progressive", item.news.cycle), default=None)

    async def _sleep(self, item: _Item | None) -> None:
        times = [one.due_s for one in self._items.values() if one.intent != "-"]
        wake_s = self._broken_until_s if item is not None else min(times, default=self._now() + _PATIENCE_S)
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), max(0.01, wake_s - self._now()))
        except asyncio.TimeoutError:
            return

    async def _step(self, item: _Item) -> None:
        """One request. Raises Trouble."""
        news, item.due_s = item.news, self._now() + item.pause_s
        item.pause_s = min(2 * item.pause_s, _POLL_S)
        if item.intent:
            about = {"log_path": news.log, "cycle_id": news.cycle, "analysis_intent": item.intent}
            reply = await self._web.ask("POST", "/logs", _REQUEST_S, content=about | self._settings.metadata)
        else:
            reply = await self._web.ask("GET", "/logs", _REQUEST_S, params={"log_path": news.log, "wait": "false"})
        if self._items.get(news.cycle) is not item:
            return  # there are newer news of this cycle
        if reply.status in _LATER:
            item.due_s = self._now() + reply.retry_after_s
        elif 400 <= reply.status < 500:
            self._on_refusal(item, reply)
        elif not 200 <= reply.status < 300:
            raise Trouble(f"status {reply.status}")
        elif item.intent == "progressive":
            item.intent = "-"
        elif item.intent:
            item.intent = ""
            if not news.fault:
                self._done(news.cycle, Answer())
        elif (answer := answer_in(reply.json())) is not None:
            self._done(news.cycle, answer)

    def _on_refusal(self, item: _Item, reply: Reply) -> None:
        """The log may come to the file system later than the news of its cycle."""
        item.refusals += 1
        if item.intent == "progressive":
            item.intent = "-"
        elif item.refusals >= _REFUSALS:
            try:
                said = reply.json()
            except Trouble:
                said = {}
            why = one_line(f"{said.get('error_code', '')} {said.get('message', '')}")[:200]
            self._give_up(item.news.cycle, f"the service refuses it with status {reply.status} {why}")

    def _on_trouble(self, item: _Item, trouble: Trouble) -> None:
        _log.warning("cycle %d: %s", item.news.cycle, trouble)
        if item.intent == "progressive":
            item.intent = "-"
        self._failures += 1
        if self._failures < _FAILURES:
            return
        if not self._said:
            self._said = True
            self._say(f"the attribution service {self._settings.endpoint} gives no answers ({trouble}); it is asked"
                      " again later, and the training goes on")  # fmt: skip
        self._broken_until_s = self._now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def _give_up(self, cycle: int, why: str) -> None:
        _log.warning("cycle %d gets no answer: %s", cycle, why)
        self._done(cycle, Answer())

    def _done(self, cycle: int, answer: Answer) -> None:
        del self._items[cycle]
        self._tell(cycle, answer)
