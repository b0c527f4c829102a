"""A look at a rank: what it does, without harm to it; and a hung rank that is held until all have been looked at."""

import asyncio
import os
import signal
import textwrap

import pytest
from monitor_harness import HANG, readable, stop

pytestmark = pytest.mark.process


WAITS = """
client.init_workload_monitoring()
client.start_section("step")
go = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: go.set())
def a_function_with_a_name_to_find():
    say("up")
    go.wait()
a_function_with_a_name_to_find()
say("goes on")
"""
SPINS = """
import re
client.init_workload_monitoring()
say("up")
re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock
"""
DEEP = """
client.init_workload_monitoring()
def \u4e2d\u4e2d\u4e2d\u4e2d(n):
    if n == 0:
        say("up")
        threading.Event().wait()
    \u4e2d\u4e2d\u4e2d\u4e2d(n - 1)
def in_the_main_thread():
    \u4e2d\u4e2d\u4e2d\u4e2d(90)
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
in_the_main_thread()
"""


async def test_a_rank_is_looked_at_twice_and_goes_on(rig):
    worker = await rig.worker(WAITS, rank_section_timeouts={"step": 60.0}).up()
    for _ in range(2):
        seen = await rig.look()
        assert seen["state"] == "S" and not seen["moves"] and seen["pid"] == worker.pid
        assert "in a_function_with_a_name_to_find" in seen["stack"] and seen["record"].strip() == "[]"
        assert 0 < seen["silent_s"] < 20 and "'step'" in seen["section"]
    os.kill(worker.pid, signal.SIGUSR1)
    assert await worker.line() == "goes on"
    assert await worker.ended() == 0 and worker.err.read_text() == ""


async def test_a_rank_that_holds_the_interpreter_shows_its_stack_only(rig):
    await rig.worker(SPINS).up()
    for _ in range(20):  # the first one may come before it has begun
        seen = await rig.look()
        if "in match" in seen["stack"] and seen["moves"] and seen["record"] == "":
            break
    assert seen["moves"] and "in match" in seen["stack"] and seen["record"] == ""


async def test_a_stopped_rank_is_known_by_its_state(rig):
    worker = await rig.worker(WAITS).up()
    stop(worker.pid)
    seen = await rig.look()
    assert seen["state"] == "T" and seen["stack"] == ""


@pytest.mark.parametrize("code, stack", [("say('up')" + HANG, ""), (DEEP, "in_the_main_thread")], ids=["no", "huge"])
async def test_a_rank_without_a_handler_or_with_a_huge_stack_is_not_harmed(rig, code, stack):
    worker = await rig.worker(code).up()
    seen = await rig.look()
    assert seen["state"] == "S" and stack in seen["stack"] and bool(stack) == bool(seen["stack"])
    assert worker.process.poll() is None


async def test_a_handler_of_a_c_library_is_left_to_it(rig):
    code = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    handler = ctypes.cast(libc.getpid, ctypes.c_void_p).value
    libc.signal(52, handler)
    client.init_workload_monitoring()
    say(libc.signal(52, handler) == handler)  # its former one
    """
    worker = rig.worker(textwrap.dedent(code) + HANG)
    assert await worker.line() == "True"
    seen = await rig.look()
    assert seen["stack"] == "" and seen["record"].strip() == "[]"


@pytest.mark.parametrize("told", [True, False])
async def test_a_hung_rank_is_held_until_the_end_of_the_look(rig, told):
    worker = rig.worker(WAITS, initial_rank_heartbeat_timeout=0.2, hold_s=60.0 if told else 1.0)
    await rig.hang()
    seen = await rig.look()
    assert "in a_function_with_a_name_to_find" in seen["stack"]
    with pytest.raises(asyncio.TimeoutError):
        await readable(worker.pidfd, 0.1)
    if told:
        rig.monitor.end_hold()
    assert await worker.ended() < 0


async def test_an_answer_needs_a_worker_and_no_message_ends_the_monitor(rig):
    rig.monitor.inspect(0.5)
    rig.monitor.end_hold()
    worker = rig.worker(WAITS, initial_rank_heartbeat_timeout=0.2)
    await rig.hang()
    assert await worker.ended() < 0
