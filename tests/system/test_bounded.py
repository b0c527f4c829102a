"""Waiting on an event loop with a bound: a cancellation is never lost."""

import asyncio

import pytest

from nvrx_slurm.system.bounded import wait_for

pytestmark = pytest.mark.fast


LONG_S = 60.0


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_counts_also_where_the_result_has_just_come(turns):
    async def story():
        event = asyncio.Event()
        waits = asyncio.ensure_future(wait_for(event.wait(), LONG_S))
        while not event._waiters:
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waits.cancel()
        await asyncio.wait({waits}, timeout=LONG_S)
        assert waits.done() and waits.cancelled() == cancelled and (cancelled or turns > 1)

    asyncio.run(story())


def test_what_is_awaited_too_long_has_ended_when_that_is_told():
    async def story():
        ends, never = [], asyncio.Event()

        async def work(result):
            try:
                await never.wait()
            except asyncio.CancelledError:
                if not result:
                    raise
            finally:
                ends.append(result)
            return result

        with pytest.raises(asyncio.TimeoutError):
            await wait_for(work(""), 0.0)
        assert await wait_for(work("in the last moment"), 0.0) == "in the last moment"
        assert ends == ["", "in the last moment"]
        other = asyncio.get_running_loop().create_future()
        other.cancel()
        with pytest.raises(asyncio.CancelledError):  # by somebody else, in time
            await wait_for(other, LONG_S)

    asyncio.run(story())
