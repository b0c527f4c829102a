"""What the workers of this node do at this moment: their monitors look, and this puts the answers together.

It is asked for by the coordinator, while a rank of the job hangs, and by `nvrx stacks`, on a Unix socket. The socket is
in the agent's private directory (mode 0700), so that the file system keeps other users away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.core.attribution.raised import frames
from nvrx_slurm.declared import plain
from nvrx_slurm.node.monitors.monitors import RankMonitor
from nvrx_slurm.system import bounded
from nvrx_slurm.types import Collective, RankEvidence, RankFault

SOCKET = "stacks"
_STACKS_S = 1.5  # for the ranks to answer `nvrx stacks`
_SEND_S = 5.0
_MOST_FRAMES, _MOST_GROUPS = 12, 8
_TEXT_CHARS = 120  # 64 ranks fit into one message of 1 MiB, whatever they write
_MOST_SEQ = 1 << 62


async def inspect(
    workers: Iterable[RankFault], monitors: Sequence[RankMonitor], within_s: float
) -> tuple[RankEvidence, ...]:
    """What is known of these workers after `within_s`, or as soon as all have answered or ended."""
    asked = [(where, monitors[where.local_rank].inspect(within_s)) for where in workers] if monitors else []
    if asked:
        await asyncio.wait([found for _, found in asked], timeout=within_s)
    seen = [(where, found.result()) for where, found in asked if found.done()]
    return tuple(_evidence(where, message) for where, message in seen if message is not None)


async def serve_stacks(
    run: Path, private_dir: Path, inspect: Callable[[float], Awaitable[tuple[RankEvidence, ...]]]
) -> asyncio.AbstractServer | None:
    """Answer `nvrx stacks` from now on. `run`: directory of the run. `inspect(within_s)` inspects the ranks.

    None where nothing can listen: `nvrx stacks` does not find these ranks, and that is all.
    """
    where = str(run.resolve())  # here: it may block

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the other end has gone
            ranks = plain(await inspect(_STACKS_S))
            writer.write(json.dumps({"run": where, "ranks": ranks}).encode())
            await bounded.wait_for(writer.drain(), _SEND_S)
        writer.close()

    with contextlib.suppress(OSError):
        return await asyncio.start_unix_server(answer, private_dir / SOCKET)
    return None


def _evidence(where: RankFault, message: Mapping[str, Any]) -> RankEvidence:
    """From what a monitor says. The rank itself has written stack and record: neither is trusted."""
    found = tuple(_text(place) for place, _ in frames(message["stack"])[:_MOST_FRAMES])
    try:
        collectives = tuple(
            Collective(_text(group), min(max(0, int(seq)), _MOST_SEQ), _text(what), bool(is_open))
            for group, seq, what, is_open in list(json.loads(message["record"] or "[]"))[:_MOST_GROUPS]
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        collectives = ()
    return RankEvidence(
        where.rank, where.infra_rank, where.host, message["state"], message["moves"], found, message["section"],
        message["silent_s"], collectives, where.local_rank, where.pid, where.log, tuple(message.get("work", ())),
    )  # fmt: skip


def _text(value: object) -> str:
    """For the console and logs: its end, without control characters. A path matters less than a line."""
    text = str(value)
    cut = text if len(text) <= _TEXT_CHARS else f"...{text[3 - _TEXT_CHARS :]}"
    return "".join(c if c.isprintable() else " " for c in cut)
