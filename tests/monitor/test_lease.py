"""The lease of a node: its monitors kill the ranks when the agent does not renew it."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from monitor_harness import WAIT_S, Rig, kill_monitor, readable, story

PARENT = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
LEASE_S = 1.0


async def renew(rig: Rig) -> None:
    """As the agent does while it hears from its coordinator."""
    while True:
        rig.lease.until_s = time.monotonic() + LEASE_S
        await asyncio.sleep(LEASE_S / 10)


@story
async def test_a_rank_and_its_children_end_with_the_lease_and_not_before() -> None:
    async with Rig() as rig:
        renewal = asyncio.ensure_future(renew(rig))
        await asyncio.sleep(0)  # the first renewal comes before the worker
        worker = rig.worker(PARENT)
        child = os.pidfd_open(int(await worker.line()))
        await kill_monitor(rig)  # the next monitor has the same lease
        await asyncio.sleep(2 * LEASE_S)  # the time under test: two leases, renewed
        assert worker.process.poll() is None
        renewal.cancel()
        for fd in (worker.pidfd, child):
            await asyncio.wait_for(readable(fd), WAIT_S)
        assert rig.lease.over
        assert worker.process.wait() == -signal.SIGKILL
        assert rig.hangs == []
        os.close(child)
