"""Tests that are coroutines, and a rank monitor for those that want one."""

import asyncio
import inspect

import pytest
from monitor_harness import Rig


@pytest.fixture
def rig():
    """Made below, in the event loop of the test."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    async def run():
        if "rig" not in given:
            return await test(**given)
        async with Rig() as given["rig"]:
            await test(**given)

    asyncio.run(run())
    return True
