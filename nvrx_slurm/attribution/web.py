"""Requests that are bounded in time and size, whatever the other side does. The one user of httpx."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import httpx

CONNECT_S = 2.0
_MAX_REPLY_BYTES = 1 << 20
_RETRY_AFTER_S = 2.0


class Trouble(Exception):
    """There was no usable reply. The message holds nothing that was sent."""


class Reply(NamedTuple):
    """A reply that came in whole."""

    status: int
    retry_after_s: float  # what it asks for, or a default
    body: bytes

    def json(self) -> dict[str, Any]:
        """Its JSON object. Raises Trouble."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Trouble(f"a reply with status {self.status} that is no JSON object")
        return found


class Web:
    """A client of one service at `base` (http, https or unix:///PATH).

    Proxies and credentials of the environment are not used, and no redirect is followed.
    """

    def __init__(self, base: str) -> None:
        import httpx  # slow to import, and only needed where something is asked

        self._httpx = httpx
        path = base.removeprefix("unix://") if base.startswith("unix://") else None
        self._base = "http://localhost" if path else base.rstrip("/")
        transport = httpx.AsyncHTTPTransport(uds=path, verify=ssl.create_default_context(), retries=0)
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)

    async def ask(
        self,
        method: str,
        path: str,
        total_s: float,
        *,
        content: Any = None,
        params: dict[str, str] | None = None,
        secret: str = "",
        most_bytes: int = _MAX_REPLY_BYTES,
    ) -> Reply:
        """One request; `content` goes as JSON, `secret` as bearer token. Raises Trouble, after `total_s` at the latest,
        also for a reply of more than `most_bytes`, and for a redirect."""
        headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": "nvrx-slurm"}
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        body = None if content is None else json.dumps(content).encode()
        if body is not None:
            headers["Content-Type"] = "application/json"
        httpx = self._httpx
        timeout = httpx.Timeout(total_s, connect=CONNECT_S)
        request = self._client.build_request(
            method, self._base + path, content=body, params=params, headers=headers, timeout=timeout
        )
        try:
            return await asyncio.wait_for(self._exchange(request, most_bytes), total_s)
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise Trouble(f"no whole reply within {total_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            text = str(error).replace(secret, "...") if secret else str(error)
            raise Trouble(f"{type(error).__name__}: {text}"[:200]) from None

    async def _exchange(self, request: httpx.Request, most_bytes: int) -> Reply:
        reply = await self._client.send(request, stream=True)
        try:
            if reply.is_redirect:
                raise Trouble(f"a redirect (status {reply.status_code}), which is not followed")
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise Trouble("a compressed reply, which was not asked for")
            body = b""
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > most_bytes:
                    raise Trouble(f"a reply of more than {most_bytes} bytes")
        finally:
            await reply.aclose()
        return Reply(reply.status_code, _seconds(reply.headers.get("retry-after", "")), body)

    async def close(self) -> None:
        """Give back what is open."""
        await self._client.aclose()


def _seconds(text: str) -> float:
    """A Retry-After of 2 to 60 seconds."""
    return min(60.0, max(_RETRY_AFTER_S, float(text))) if text.isdecimal() else _RETRY_AFTER_S
