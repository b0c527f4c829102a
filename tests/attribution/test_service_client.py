"""The client of a service elsewhere, against services that answer, lie, hang, flood and redirect."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import build_opener

import pytest
from fakes import Answer as Script
from fakes import Fake, breaks, drips, floods, hangs, reply
from stage import free_port

from nvrx_slurm.attribution import client
from nvrx_slurm.attribution.client import Client
from nvrx_slurm.attribution.records import AttributionSpec, CycleNews, Recommendation
from nvrx_slurm.attribution.web import Trouble

pytestmark = pytest.mark.process


FAULT = {"kind": "exit", "message": "ValueError: x"}
SUBMITTED = reply(200, {"submitted": True, "normalized_path": "/x", "mode": "single"})


def status(word: str | None, action: str = "UNKNOWN", reason: str = "why", **more: Any) -> bytes:
    """A reply to GET /logs."""
    said = {"action": action, "reason": reason, "source": "test"}
    return reply(200, {"result": {}, "recommendation": said, **({"status": word} if word else {}), **more})


class Side:
    """A client at work. Its job ends when it says something, so that no test waits for the end of its time."""

    def __init__(self, url: str) -> None:
        self.said: list[str] = []
        self._ending = asyncio.Event()
        self._client = Client(AttributionSpec(url, user="u", job_id="7"), self._say)

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        self._ending.set()

    async def of(self, cycle: int, over: bool = True, fault: dict[str, Any] | None = None) -> Recommendation:
        news = CycleNews(cycle, f"/logs/x_cycle{cycle}.log", over, 1.0, FAULT if fault is None else fault)
        work, end = asyncio.ensure_future(self._client.answer(news)), asyncio.ensure_future(self._ending.wait())
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        assert work.done() or self._client.is_down
        with contextlib.suppress(Trouble, asyncio.CancelledError):
            work.cancel()
            return await work
        return Recommendation()


def answer_of(url: str) -> tuple[Recommendation, list[str]]:
    """The answer about a cycle that failed, and what was said."""

    async def play() -> tuple[Recommendation, list[str]]:
        side = Side(url)
        return await side.of(3), side.said

    return asyncio.run(play())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "_FIRST_POLL_S": 0.01,
        "_POLL_S": 0.01,
        "_REQUEST_S": 0.3,
        "_LONGEST_PAUSE_S": 0.05,
        "_ANSWER_WITHIN_S": 20.0,
    }
    for name, value in times.items():
        monkeypatch.setattr(client, name, value)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ((SUBMITTED, status("pending"), status("in_flight"), status("completed", "STOP")), "STOP: why (test)"),
        ((SUBMITTED, status("completed", "restart ")), "RESTART: why (test)"),
        ((SUBMITTED, status("completed", "burn it", "")), ""),
        ((SUBMITTED, status("completed", "STOP", "a\x1b[31m\nb" * 200)), "STOP: a?[31m b"),
        ((SUBMITTED, status("failed")), "UNKNOWN: the analysis failed"),
        ((SUBMITTED, reply(429, {}, Retry_After="1"), status("completed", "STOP")), "STOP: why (test)"),
        ((reply(304, b""), SUBMITTED, status("completed", "STOP")), "STOP: why (test)"),
        ((breaks, SUBMITTED, breaks, status("completed", "STOP")), "STOP: why (test)"),
        ((SUBMITTED, reply(200, b"<html>", "text/html"), status("completed", "STOP")), "STOP: why (test)"),
        ((SUBMITTED, status("completed", "STOP", pad="x" * (1 << 20)), status("completed", "RESTART")), "RESTART"),
        ((reply(404, {"error_code": "not_found"}), SUBMITTED, status("completed", "STOP")), "STOP: why (test)"),
        ((reply(403, {"errorcode.outside_root": 1}),), ""),
    ],
)
def test_each_answer_becomes_one_line_for_the_agent(
    fake: Callable[..., Fake], script: tuple[Script, ...], text: str
) -> None:
    service = fake(*script)
    answer, _ = answer_of(service.url)
    assert answer.text.startswith(text) and bool(answer.text) == bool(text) and len(answer.text) < 600
    assert len(service.script) == 1, "not every reply of the script was asked for"


@pytest.mark.parametrize("worst", [hangs, drips, floods])
def test_a_service_that_misbehaves_is_left_alone_and_costs_nothing_but_its_answer(
    fake: Callable[..., Fake], worst: Script
) -> None:
    service = fake(worst)
    answer, said = answer_of(service.url)
    assert answer.text == "" and len(said) == 1 and "the training goes on" in said[0]
    assert len(service.asked) == 3 and {one.method for one in service.asked} == {"POST"}
    assert not service.swallowed.is_set()


def test_a_redirect_is_not_followed(fake: Callable[..., Fake]) -> None:
    other = fake(SUBMITTED)
    service = fake(reply(307, SUBMITTED, Location=f"{other.url}/logs"))
    answer, said = answer_of(service.url)
    assert answer.text == "" and len(said) == 1 and other.asked == []


def certificate(tmp_path: Path) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that only itself vouches for, and its key."""
    cert, key = f"{tmp_path}/cert", f"{tmp_path}/key"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "2", "-keyout", key]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", cert]
    try:
        subprocess.run(make, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no certificate can be made: {error}")
    return cert, key


@pytest.mark.parametrize("known", [True, False])
def test_a_service_by_https_must_prove_who_it_is(
    fake: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    cert, key = certificate(tmp_path)
    service = fake(SUBMITTED, status("completed", "STOP"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    service.prove_itself(context)
    if known:
        monkeypatch.setenv("SSL_CERT_FILE", cert)
    answer, said = answer_of(service.url.replace("http:", "https:"))
    assert (answer.action, len(service.asked)) == (("STOP", 2) if known else ("UNKNOWN", 0))
    assert known or "certificate verify failed" in said[0].lower()


def test_a_service_that_is_not_there() -> None:
    began_s = time.monotonic()
    answer, said = answer_of(f"http://127.0.0.1:{free_port()}")
    assert answer.text == "" and len(said) == 1
    assert time.monotonic() - began_s < 10


def test_what_is_submitted(fake: Callable[..., Fake]) -> None:
    service, seen, is_over = fake(SUBMITTED), [], threading.Event()

    def answer(asked: Any) -> Script:
        ends = asked.json["analysis_intent"] == "terminal" and is_over.set() is None
        seen.append((ends, is_over.wait(0.2)))  # the end of a cycle is not told before its beginning is answered
        return SUBMITTED

    service.answer = answer  # type: ignore[method-assign]

    async def play() -> None:
        side = Side(service.url)  # it ended well: no answer is asked for
        await asyncio.gather(side.of(0, over=False, fault={}), side.of(0, fault={}))

    asyncio.run(play())
    assert seen == [(False, False), (True, True)]
    bodies = [one.json for one in service.asked]
    common = {"log_path": "/logs/x_cycle0.log", "cycle_id": 0, "user": "u", "job_id": "7"}
    assert bodies == [common | {"analysis_intent": intent} for intent in ("progressive", "terminal")]


def test_many_cycles_at_once_are_all_answered(fake: Callable[..., Fake]) -> None:
    service = fake(SUBMITTED)
    service.answer = lambda asked: SUBMITTED if asked.method == "POST" else status("completed", "RESTART")  # type: ignore[method-assign]

    async def play() -> list[Recommendation]:
        side = Side(service.url)
        return await asyncio.gather(*map(side.of, range(8)))

    assert [one.action for one in asyncio.run(play())] == ["RESTART"] * 8


def test_a_service_that_is_broken_for_long_is_given_up(fake: Callable[..., Fake], monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "_ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(client, "_FAILURES", 10_000)
    service = fake(reply(500, {}))
    assert answer_of(service.url) == (Recommendation(), [])


def test_no_proxy_is_used(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = fake(reply(502, {}))
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    service = fake(SUBMITTED, status("completed", "STOP"))
    assert answer_of(service.url)[0].action == "STOP" and proxy.asked == []
    with pytest.raises(HTTPError, match="502"):  # others do use it
        build_opener().open(service.url, timeout=20)  # urlopen keeps the proxies of its first call
    assert len(proxy.asked) == 1


def test_a_service_that_was_down_is_asked_again(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Side, "_say", lambda side, sentence: side.said.append(sentence))
    service = fake(hangs, hangs, hangs, SUBMITTED, status("completed", "STOP"))
    answer, said = answer_of(service.url)
    assert answer.action == "STOP" and len(said) == 1
