"""Requests that are bounded in time and size, whatever the other side does. The one user of httpx."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

from nvrx_slurm.core.words import one_line
from nvrx_slurm.system import bounded

CONNECT_S = 2.0
_MAX_REPLY_BYTES = 1 << 20
_BUSY = (408, 425, 429)
_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0


class Trouble(Exception):
    """There was no usable reply. The message holds no key."""

    def __init__(self, why: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(why[:200])
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def is_refusal(self) -> bool:
        """Whether the service works, and takes this request for a mistake."""
        return 400 <= self.status < 500 and self.status not in _BUSY


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a reply. Raises Trouble."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Trouble("a reply that is no JSON object")
    return found


class Web:
    """A client of one service at `base` (http, https or unix:///PATH).

    Proxies and credentials of the environment are not used, and no redirect is followed.
    """

    def __init__(self, base: str) -> None:
        import httpx  # slow to import, and only needed where something is asked

        self._errors = httpx.HTTPError, httpx.InvalidURL, OSError
        socket = base.removeprefix("unix://") if base.startswith("unix://") else None
        self._base = "http://localhost" if socket else base
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, verify=ssl.create_default_context()),
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            headers={
                "Accept-Encoding": "identity",
                "Connection": "close",
                "User-Agent": "nvrx-slurm",
            },
        )

    async def ask(
        self, method: str, path: str, total_s: float, *, tries: int = 1, **what: Any
    ) -> bytes:
        """The body of the reply to a request, which is tried again where that may help. Raises Trouble.

        `total_s`: for each try. `what`: see `_once`.
        """
        for number in range(tries):
            try:
                return await bounded.wait_for(self._once(method, path, **what), total_s)
            except Trouble as error:
                trouble = error
            except (asyncio.TimeoutError, *self._errors) as error:
                trouble = Trouble(str(error) or "no whole reply in time")
            if number == tries - 1 or trouble.is_refusal:
                break
            await asyncio.sleep(min(trouble.retry_after_s or _PAUSE_S * 2**number, _MAX_PAUSE_S))
        raise trouble

    async def _once(self, method: str, path: str, *, secret: str = "", **what: Any) -> bytes:
        """`secret` goes as bearer token; `what`: json (a value for the body), params (of the URL)."""
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        body = b""
        async with self._client.stream(method, self._base + path, headers=headers, **what) as reply:
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > _MAX_REPLY_BYTES:
                    raise Trouble(f"a reply of more than {_MAX_REPLY_BYTES} bytes")
        if reply.is_success:
            return body
        # it may repeat what was sent
        said = "" if secret else one_line(body[:200].decode("utf-8", "replace"))
        after = reply.headers.get("retry-after", "")
        retry_after_s = min(60.0, float(after)) if after.isdecimal() else 0.0
        raise Trouble(
            f"status {reply.status_code} {said}".strip(), reply.status_code, retry_after_s
        )
