"""The shared page: complete reads, sealed size, refused files."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import time

import pytest
from monitor_harness import ROOT

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
    writer = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], pass_fds=[fd])
    try:
        words = Page(fd).words
        deadline_s = time.monotonic() + 20
        while words[HEARTBEAT] == 0:
            assert time.monotonic() < deadline_s
            select.select([], [], [], 0.001)
        seen = {ONES: 0, TWOS: 0}
        while min(seen.values()) < 1000:  # both were seen, often
            for _ in range(10000):
                seen[words[HEARTBEAT]] += 1  # KeyError: torn
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
    assert PAGE_BYTES == 4096 == 512 * 8 and mmap.PAGESIZE % PAGE_BYTES == 0


def test_other_files_and_overwritten_pages_are_refused():
    fd = os.memfd_create("other")
    with pytest.raises(PageError, match="size"):
        Page(fd)
    os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(PageError, match="layout"):
        Page(fd)
    os.close(fd)
    fd = create_page()
    page = Page(fd)
    page.words[0] = 1
    page.close()
    with pytest.raises(PageError, match="layout"):
        Page(fd)
    os.close(fd)
