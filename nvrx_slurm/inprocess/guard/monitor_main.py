"""The program of the monitor process, which sees that its rank is dead, stopped or hung.

The monitor process of rank 0 also runs the store's server (unless that is elsewhere) and the server of all barriers,
until all ranks have left. So the loss of rank 0's process is like the loss of any other.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe
from nvrx_slurm.inprocess.environment import Identity
from nvrx_slurm.inprocess.guard import detach
from nvrx_slurm.inprocess.guard.hang_watch import HangWatch
from nvrx_slurm.inprocess.guard.launcher import Board
from nvrx_slurm.inprocess.guard.page import COUNTED, GONE, ITERATION, LEFT, LOST, SEEN, Page
from nvrx_slurm.inprocess.guard.progress import Stall
from nvrx_slurm.inprocess.guard.store_link import StoreLink
from nvrx_slurm.inprocess.store.barriers import ENTRY, SERVES, BarrierServer
from nvrx_slurm.inprocess.store.fallback_server import FallbackServer
from nvrx_slurm.inprocess.store.view import StoreView

logger = logging.getLogger(__name__)

LEAVE, MEET = b"L", b"M"  # first byte of a message from the rank
READY = b"+"  # the answer when it works
MAX_MESSAGE = 4096  # bytes
_OUTLAST_S = 1.0  # between two looks at the store when the rank has left


class Monitor:
    """The monitor process."""

    def __init__(
        self,
        arguments: Arguments,
        identity: Identity,
        page: Page,
        rank_pidfd: int,
        channel: socket.socket,
    ) -> None:
        self._arguments, self._me, self._page = arguments, identity, page
        self._pidfd, self._channel = rank_pidfd, channel
        self._left = False

    def main(self) -> NoReturn:
        """Run until nothing is left to do; never returns into the code of the parent."""
        code = 1
        pidfile = self._arguments.file_of("monitor_process_pidfile", self._me.rank)
        try:
            self._prepare(pidfile)
            self._serve()
            code = 0
        except BaseException:
            logger.exception("the monitor process failed")
        finally:
            if pidfile:
                with contextlib.suppress(OSError):
                    os.unlink(pidfile)
            os._exit(code)

    def _prepare(self, pidfile: str | None) -> None:
        """Tells the rank when it is done, or why it cannot be."""
        detach.detach({self._pidfd, self._channel.fileno()})
        self._me.environment.restore_variables()
        try:
            detach.log_to(self._arguments.file_of("monitor_process_logfile", self._me.rank))
            if pidfile:
                with open(pidfile, "w") as file:
                    file.write(f"{os.getpid()}\n")
            self._make = self._connect()
        except BaseException as error:
            self._answer(describe(error).encode()[:MAX_MESSAGE])
            raise
        self._page.words[SEEN] = time.monotonic_ns()
        self._answer(READY)

    def _answer(self, message: bytes) -> None:
        """To the rank, which may have died or left already."""
        with contextlib.suppress(OSError):
            self._channel.send(message, socket.MSG_NOSIGNAL)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _make_view(self) -> StoreView:
        return StoreView(self._arguments.make_store()).under(self._me.prefix)

    def _connect(self) -> Callable[[], StoreView]:
        """The first rank makes the store at once, since it may be the server; the others connect later."""
        if not self._me.leads:
            return self._make_view
        view = self._make_view()
        view.set(SERVES, "1" if getattr(view.store, "serves", False) else "0")
        return lambda: view

    def _is_lost(self) -> bool:
        """Whether the store is lost. A store that does not answer is, since the link waits for it without a bound."""
        link = self._link
        entered = link.passes or self._page.words[ITERATION] > ENTRY  # before, there may be no server yet
        if entered and not link.lost:
            silent_s = self._link_stall.seconds(link.passes)
            if silent_s >= self._arguments.seconds("heartbeat_timeout"):
                link.give_up(f"it has not answered for {silent_s:.1f} s")
        return link.lost

    # --- threads, from beginning to end -------------------------------------------------------------------------------

    def _serve(self) -> None:
        arguments, me, set_word = self._arguments, self._me, self._page.words.__setitem__
        self._link = StoreLink(
            self._make, me.rank, me.world_size, arguments, partial(set_word, LOST, 1), partial(set_word, GONE, 1)
        )
        self._hangs = HangWatch(arguments, self._page, self._pidfd, self._tell)
        self._link_stall = Stall(self._hangs.longest_s)
        barriers = None
        if me.leads:
            barriers = BarrierServer(self._make_view, me.world_size, arguments)
            self._link.stays = True
            barriers.start()
        self._link.start()
        self._fallback = FallbackServer(self._make_view, arguments.seconds("last_call_wait"), arguments.overdue_s)
        gc.freeze()
        self._watch()
        if barriers is not None:
            self._outlast(barriers.over, math.inf)  # until all ranks have left
        elif not self._left:
            self._outlast(self._link.over, arguments.seconds("barrier_timeout"))
        else:
            self._outlast(self._fallback.idle, arguments.overdue_s)
        logger.info("the monitor process of rank %d ends", me.rank)

    def _outlast(self, over: threading.Event, timeout_s: float) -> None:
        """Stay for the others, until no rank can be reached any more."""
        deadline_s = time.monotonic() + timeout_s
        while not over.wait(min(_OUTLAST_S, self._hangs.longest_s)):
            if self._is_lost() or time.monotonic() >= deadline_s:
                return

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the rank has left, or is dead and the link knows."""
        board = Board.from_env()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        if board is not None and board.fd is not None:
            poll.register(board.fd, select.POLLIN)
        due_s = time.monotonic()
        while True:
            look_s, killed = self._hangs.look(due_s)
            if killed:
                self._declare_dead(f"killed: {killed}")
                return
            ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * (look_s - time.monotonic())))}
            due_s = min(look_s, time.monotonic())
            if self._channel.fileno() in ready:  # first: what the rank sent before it died
                if not self._receive(poll):
                    return
            elif self._pidfd in ready:
                self._declare_dead("its process has ended")
                return
            if board is not None:
                self._read(board)
            self._is_lost()

    def _receive(self, poll: Any) -> bool:
        """One message of the rank; whether to go on."""
        try:
            message = self._channel.recv(MAX_MESSAGE)
        except ConnectionError:  # it died before it read our READY
            message = b""
        if message.startswith(MEET):
            self._fallback.expect(*json.loads(message[len(MEET) :]))
            return True
        if message.startswith(LEAVE):
            self._declare_dead(f"it leaves: {message[len(LEAVE) :].decode(errors='replace')}")
            return False
        poll.unregister(self._channel.fileno())  # closed: the rank is dying, and the pidfd tells when it is dead
        return True

    def _read(self, board: Board) -> None:
        records = board.read()
        if records:
            logger.info("reported from outside: %s", "; ".join(record.sentence() for record in records))
            self._link.declare(records)

    def _tell(self, number: int, kind: Interruption, text: str) -> None:
        logger.warning("iteration %d: %s: %s", number, kind.name, text)
        self._link.interrupt(number, InterruptionRecord(self._me.rank, kind, text))

    def _declare_dead(self, why: str) -> None:
        if self._page.words[LEFT] and not self._page.words[COUNTED]:
            self._left = True
            return
        logger.warning("rank %d: %s", self._me.rank, why)
        self._link.declare([InterruptionRecord(self._me.rank, Interruption.TERMINATED, why)])
