"""The shared page: what a reader can and cannot see, whoever writes."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import subprocess
import sys
import time

import pytest
from monitor_harness import ROOT, Rig

from nvrx_slurm.monitor.page import HEARTBEAT, PAGE_BYTES, Page, PageError, create_page

ONES, TWOS = 0x1111_1111_1111_1111, 0x2222_2222_2222_2222


def test_no_read_is_torn_while_another_process_writes():
    """Two patterns that differ in every byte, written as fast as possible; a mixture would be a torn read."""
    fd = create_page()
    code = f"""
import sys; sys.path.insert(0, {ROOT!r})
from nvrx_slurm.monitor.page import Page, HEARTBEAT
words = Page({fd}).words
while True:
    words[HEARTBEAT] = {ONES}
    words[HEARTBEAT] = {TWOS}
"""
    writer = subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd])
    try:
        words = Page(fd).words
        deadline_s = time.monotonic() + 20
        while words[HEARTBEAT] == 0:
            assert time.monotonic() < deadline_s
        seen = {ONES: 0, TWOS: 0}
        while min(seen.values()) < 1000:  # the injected race really happened: both were seen, often
            for _ in range(10000):
                seen[words[HEARTBEAT]] += 1  # KeyError = torn
            assert time.monotonic() < deadline_s, seen
    finally:
        writer.kill()
        writer.wait()
        os.close(fd)


def test_nobody_can_shrink_the_page_under_its_readers():
    fd = create_page()
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_other_files_are_refused():
    fd = os.memfd_create("other")
    with pytest.raises(PageError, match="wrong size"):
        Page(fd)
    os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(PageError, match="another layout"):
        Page(fd)
    os.close(fd)


VANDAL = """
import mmap
client.init_workload_monitoring()
client.send_heartbeat()
words = client._page.words
say("init")
sys.stdin.readline()
import random
random.seed({seed})
for _ in range(20000):
    words[random.randrange(512)] = random.choice([0, -1, 2**63 - 1, -2**63, random.getrandbits(62)])
words[{heartbeat}] = {last}
say("done")
threading.Event().wait()
"""


@pytest.mark.parametrize("last", [2**63 - 1, -1, 0, 5])
def test_a_rank_that_writes_garbage_into_its_page_harms_only_itself(last):
    """No crash, no hang of the monitor; implausible times are no sign of life; another monitor can still take over."""

    async def story():
        async with Rig() as rig:
            seed = random.randrange(1000)
            worker = rig.worker(VANDAL.format(seed=seed, heartbeat=HEARTBEAT, last=last), rank_heartbeat_timeout=1.0)
            assert await worker.line() == "init"
            await rig.settled()
            pid = rig.pid
            worker.tell("go")
            assert await worker.line() == "done"
            message = await rig.hang()
            assert message["sentence"].startswith("no heartbeat for ")
            await worker.ended()
            assert rig.pid == pid

    asyncio.run(story())


def test_the_page_is_one_page():
    assert PAGE_BYTES == 4096 == 512 * 8 and mmap.PAGESIZE % PAGE_BYTES == 0
