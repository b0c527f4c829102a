"""The shared page: complete reads, sealed size, refused files."""

from __future__ import annotations

import os

import pytest

from nvrx_slurm.monitor.page import PAGE_BYTES, Page, PageError, create_page


def test_nobody_can_shrink_the_page_under_its_readers():
    fd = create_page()
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


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
