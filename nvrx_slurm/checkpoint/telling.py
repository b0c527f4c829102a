"""What a rank tells its monitor of what it keeps: for the account, and for people."""

from __future__ import annotations

import os
from contextlib import suppress
from time import monotonic_ns

from nvrx_slurm.codec import to_json
from nvrx_slurm.declared import plain
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.monitor import page, transport, wire
from nvrx_slurm.records import Loaded


class Monitor:
    """The rank monitor; does nothing where there is none, or where it does not answer."""

    def __init__(self) -> None:
        self._path = os.environ.get(wire.SOCKET_ENV, "")
        self._page: page.RankPage | None = None
        fds: list[int] = []
        with suppress(NvrxError, OSError, page.PageError):
            if self._path:
                _, fds = transport.request(self._path, "page")
                self._page = page.RankPage(fds[0])
        for fd in fds:
            os.close(fd)

    def is_at(self, iteration: int, saved: bool) -> None:
        """The state is of this iteration. `saved`: it is in memory by now."""
        if self._page is None:
            return
        words = self._page.words
        words[page.KEPT_STEPS] = words[page.BEATS] or words[page.STEPS]
        words[page.KEPT_ITERATION] = iteration + 1
        if saved:
            words[page.KEPT] = monotonic_ns()

    def tell(self, loaded: Loaded) -> None:
        """The coordinator says it, and counts."""
        if self._path:
            with suppress(NvrxError):
                told = to_json(plain(loaded))
                transport.request(self._path, "control", action=wire.LOADED, description=told)
