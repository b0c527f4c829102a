"""Run as a process: one agent's client ("client PORT") or a coordinator's server ("server PORT") that prints events."""

from __future__ import annotations

import asyncio
import sys

from wire_harness import Client, Server


async def main(role: str, port: int, keepalive: tuple[float, float]) -> None:
    """Until killed."""
    if role == "client":
        async with Client(port, keepalive=keepalive) as client:
            while True:
                print(await client.inbox.next(object, 100), flush=True)
    async with Server(keepalive=keepalive, ports=(port,), say=lambda text: print(text, flush=True)) as server:
        print(server.port, flush=True)
        while True:
            print(await server.inbox.next(object, 100), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2]), (float(sys.argv[3]), float(sys.argv[4]))))
