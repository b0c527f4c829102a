"""The agent's side of a rank monitor: spawn it, hand it each worker, hear of hangs, replace it when it dies, reap it.

Everything runs on the agent's asyncio loop; nothing blocks for longer than a spawn (about 1 ms). The shared page and
the socket of the rank must survive the monitor's process. They are made and kept here, and lent to it with `watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.child import processes
from nvrx_slurm.child.supervised import SupervisedProcess
from nvrx_slurm.codec import from_plain
from nvrx_slurm.core.rank.loss import LossReport
from nvrx_slurm.declared import Record
from nvrx_slurm.errors import ProtocolError, UsageError
from nvrx_slurm.monitor import kill, wire
from nvrx_slurm.monitor import page as layout
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.monitor.page import INIT, LEAVES, WARNED, WORDS, RankPage, create_page
from nvrx_slurm.node.monitors import monitor_start
from nvrx_slurm.system.files import MAX_SOCKET_PATH_BYTES

log = logging.getLogger(__name__)


def faulthandler_env() -> dict[str, str]:
    """What lets a monitored worker print its stacks."""
    return {} if "PYTHONFAULTHANDLER" in os.environ else {"PYTHONFAULTHANDLER": "1"}


def unix_s(at_s: float) -> float:
    """`time.time()` of a monotonic time; 0 of 0."""
    return at_s and time.time() - (time.monotonic() - at_s)


OnHang = Callable[[int, dict[str, Any]], None]
OnAsked = Callable[[int, "t.WorkloadAction", str], None]


class WatchRules(Record):
    """How a worker is watched. `settings`: further ones for `client.cfg` (JSON)."""

    limits: Mapping[str, Any]  # seconds, by the names of `core.rank.watch.RankLimits`; None or absent = no limit
    signum: int = signal.SIGKILL  # rank_termination_signal
    settings: Mapping[str, Any] | None = None
    hold_s: float = 0.0  # a hung rank is ended that much later, or at end_hold()


class Life:
    """What one life of a worker shares with its monitor: the page and the socket, at a path of its own.

    A process left over from an earlier life has the page and the path of that life, and can say nothing about this one.
    """

    def __init__(self, private_dir: Path, local_rank: int, number: int) -> None:
        self.path = private_dir / f"{wire.socket_prefix(local_rank)}{number}"
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH_BYTES:
            raise UsageError(
                f"{self.path} is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes): set a shorter TMPDIR"
            )
        self.watch: bytes | None = None  # the message, once there is a worker
        self.pidfd = -1
        self.hung = False
        with contextlib.ExitStack() as stack:
            self.listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before the first request
            self.ends = [stack.enter_context(end) for end in socket.socketpair()]  # for monitor.inspect
            self.page_fd = create_page()
            stack.callback(os.close, self.page_fd)
            self.stacks_fd = os.memfd_create("nvrx-stacks", os.MFD_CLOEXEC)
            stack.callback(os.close, self.stacks_fd)
            self.page = RankPage(self.page_fd)
            stack.callback(self.page.close)
            self.listener.bind(os.fspath(self.path))
            stack.callback(self.path.unlink, missing_ok=True)
            self._resources = stack.pop_all()

    def begin(self, message: bytes, pidfd: int) -> None:
        """There is a worker. `pidfd` stays the caller's. Raises OSError."""
        self.pidfd = os.dup(pidfd)
        self._resources.callback(os.close, self.pidfd)
        self.watch, self.hung = message, False

    def fds(self) -> list[int]:
        return [self.pidfd, self.page_fd, *(s.fileno() for s in (self.listener, *self.ends)), self.stacks_fd]

    def close(self) -> None:
        """Never raises; a second call does nothing."""
        with contextlib.suppress(OSError):  # the directory is no longer ours: no rank finds the socket there
            self._resources.close()


def warn_all(monitors: Sequence[RankMonitor]) -> None:
    """Also those of workers that are about to start."""
    for monitor in monitors:
        monitor.warn()


def none_asked(monitors: Sequence[RankMonitor]) -> bool:
    """Whether workers were warned, and should_stop() has said so to none of them."""
    pages = [monitor._life.page.words for monitor in monitors if monitor._life is not None]
    return any(page[WARNED] for page in pages) and not any(page[LEAVES] for page in pages)


class RankMonitor(SupervisedProcess):
    """The monitor of one local rank over all cycles. All methods belong to the thread of the running event loop.

    `private_dir`: a directory of this agent with mode 0700 (checked; UsageError). `on_hang(local_rank, message)` is
    called once per worker that the monitor found hung and is about to end (see hear()); `message` is the monitor's
    `hang`: cycle, rank, local_rank, pid, sentence, deadline_s and at_s (monotonic seconds).
    `on_asked(local_rank, action, description)` is called for each workload control request of the worker (twice if the
    monitor was killed just then), before its exit is seen.

    `lease`: the monitor kills the worker when it is over; None: it may run without a coordinator.

    start(); then per cycle: worker_env() -> spawn the worker as a session leader -> watch() -> its exit is seen ->
    hear() -> unwatch(); in the end close(). A monitor reports a hang before it ends the worker. So after hear()
    on_hang() has been called if that is why the worker ended, and on_asked() for all that it asked for.
    """

    def __init__(
        self,
        local_rank: int,
        private_dir: Path,
        on_hang: OnHang,
        on_asked: OnAsked,
        lease: Lease | None = None,
        on_loaded: Callable[[t.Loaded], None] = lambda loaded: None,
    ) -> None:
        super().__init__()
        self._lease = lease
        self.local_rank = local_rank
        self._dir = Path(private_dir)
        self._on_hang = on_hang
        self._on_asked = on_asked
        self._on_loaded = on_loaded
        self._inspections: list[asyncio.Future[dict[str, Any] | None]] = []
        self._lives = 0
        self._reported = 0  # number of the last report when it was read before
        self._life: Life | None = None

    def start(self) -> None:
        """Make its socket; spawn() starts the process.

        Raises UsageError (bad directory); after that nothing about a monitor is an error.
        """
        try:
            self._life = self._make_life()
        except OSError as error:
            self._say_unmonitored(error)

    def worker_env(self) -> dict[str, str]:
        """Variables for the next worker; ask again after each unwatch(), because the socket is new then.

        Without `wire.SOCKET_ENV` if the rank cannot be monitored this time.
        """
        if self._life is None or not self._life.path.exists():
            self._new_life()
        env = {} if self._life is None else {wire.SOCKET_ENV: os.fspath(self._life.path)}
        return env | faulthandler_env()

    @property
    def page(self) -> str:
        """Where the next worker finds its page, and where its stacks go (see `warm.steps`); "" = it has none.

        Ask after `worker_env`.
        """
        life = self._life
        if life is None:
            return ""
        page, stacks = (f"{fd} {os.fstat(fd).st_ino}" for fd in (life.page_fd, life.stacks_fd))
        return f"{os.getpid()} {page} {layout.PAGE_BYTES} {layout.STEP} {stacks} {kill.INSPECT_SIGNAL}"

    def watch(self, *, pid: int, pidfd: int, cycle: int, rank: int, rules: WatchRules) -> None:
        """Watch the worker just spawned with worker_env().

        `pid`: a session leader; `pidfd` stays the caller's. Raises ValueError for settings over 64 KiB; nothing has
        changed then.
        """
        life, limits, signum = self._life, dict(rules.limits), int(rules.signum)
        worker = {"cycle": cycle, "rank": rank, "local_rank": self.local_rank, "pid": pid}
        settings = {**(rules.settings or {}), **limits, "rank_termination_signal": signum}
        told = {"limits": limits, "signal": signum, "cfg": settings, "hold_s": rules.hold_s}
        message = wire.encode("watch", started_s=time.monotonic(), **worker, **told)
        if life is None:
            return  # was said when it could not be made
        try:
            life.begin(message, pidfd)
        except OSError as error:
            return self._say_unmonitored(error)
        self.send(message, life.fds())

    def inspect(self, within_s: float) -> asyncio.Future[dict[str, Any] | None]:
        """Have the monitor find out what the worker does (see `monitor.inspect`).

        The result is None if the worker ends before that. If the monitor dies, there is none.
        """
        found: asyncio.Future[dict[str, Any] | None] = self._loop.create_future()
        self._inspections.append(found)
        self.send(wire.encode("inspect", within_s=within_s))
        return found

    def _end_inspections(self, message: dict[str, Any] | None) -> None:
        inspections, self._inspections = self._inspections, []
        for found in inspections:
            if not found.done():
                found.set_result(message)

    def end_hold(self) -> None:
        """A hung worker can be ended now."""
        self.send(wire.encode("end"))

    def should_exit(self) -> None:
        """Most ranks of the node have ended well."""
        self.send(wire.encode("exit"))

    def warn(self) -> None:
        """Have `RankMonitorClient.should_stop()` say yes in the worker that is watched, now or when it asks first."""
        if self._life is not None:
            words = self._life.page.words
            words[WARNED] = words[WARNED] or time.monotonic_ns()

    @property
    def leaves(self) -> bool:
        """Whether should_stop() has said yes to the worker; ask before unwatch()."""
        return self._life is not None and self._life.page.words[LEAVES] != 0

    @property
    def connected(self) -> bool:
        """Whether the worker has called init_workload_monitoring(); ask before unwatch()."""
        return self._life is not None and self._life.page.words[INIT] != 0

    def words(self) -> list[int] | None:
        """All words of the page, where there is one; ask before unwatch()."""
        return None if self._life is None else self._life.page.words[:WORDS].tolist()

    def reports(self, read: int, right: bool) -> tuple[int, list[LossReport]]:
        """What the worker has reported after number `read`: (number of the last one, reports).

        The slot of the last report may be half written. It is left out until it is the last one a second time.
        `right`: nothing is wrong with the reports until `read`, so the worker may save.
        """
        if self._life is None:
            return read, []
        page = self._life.page
        if right:
            page.words[layout.JUDGED] = read
        until = page.words[layout.REPORTED]
        until, self._reported = until - (until != self._reported), until
        numbers = range(max(read, until - layout.REPORT_SLOTS + 1) + 1, until + 1)
        return max(read, until), [LossReport(*page.report(number)) for number in numbers]

    def fail(self, why: str) -> None:
        """Kill the worker, whose loss is wrong."""
        life = self._life
        if life is not None and life.watch is not None and not life.hung:
            pid, life.hung = int(str(wire.decode(life.watch)["pid"])), True
            self._on_hang(self.local_rank, {"pid": pid, "sentence": why, "kind": t.FaultKind.LOSS})
            kill.send(life.pidfd, signal.SIGKILL)

    def unwatch(self) -> None:
        """The worker is gone (or no longer to be judged): forget it, and make ready for the next."""
        self.send(wire.encode("unwatch"))
        self._end_inspections(None)
        self._new_life()

    async def close(self) -> None:
        """End and reap the monitor and remove its socket; at most 2 x CLOSE_TIMEOUT_S. The worker is left alone."""
        await super().close()
        if self.pid is not None:
            log.error("rank monitor %d (pid %d) does not end after SIGKILL", self.local_rank, self.pid)
        if self._life is not None:
            self._life.close()
            self._life = None

    def _ask_to_end(self) -> None:
        self.send(wire.encode("unwatch"))
        self.send(wire.encode("quit"))

    # --- the process ------------------------------------------------------------------------------

    def _new_life(self) -> None:
        """The next life, or none, which costs its rank the monitor until the one after that and nothing else."""
        old, self._life = self._life, None
        if old is not None:
            old.close()
        try:
            self._life = self._make_life()
        except (OSError, UsageError) as error:
            self._say_unmonitored(error)

    def _make_life(self) -> Life:
        """Raises OSError, and UsageError where the directory is not this user's alone."""
        with contextlib.suppress(FileExistsError):  # an epilog or a tmp cleaner may have removed it
            self._dir.mkdir(0o700)
        status = self._dir.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(
                f"{self._dir} must belong to this user alone (mode 0700) to hold the rank monitors' sockets"
            )
        self._lives += 1
        return Life(self._dir, self.local_rank, self._lives - 1)

    def _say_unmonitored(self, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        log.warning("local rank %d goes on without its monitor (%s: %s)", self.local_rank, self._dir, why)

    def _start(self) -> tuple[processes.Child, socket.socket]:
        child, (channel,) = monitor_start.start(self._dir, self._lease, [self.local_rank])
        return child, channel

    def _on_start(self) -> None:
        if self._life is not None and self._life.watch is not None:
            self.send(self._life.watch, self._life.fds())

    def _on_failure(self, error: Exception) -> None:
        self._replace(f"rank monitor {self.local_rank} cannot be started ({error})")

    def connect(self, channel: socket.socket) -> None:
        """A process is being started that will read this."""
        self._channel, self._began_s = channel, self._loop.time()
        self._on_start()

    def take_over(self, wanted: bool) -> None:
        """The process at the other end was forked for this monitor and is our child now, unless that failed.

        `wanted`: another one is started then.
        """
        channel = self._channel
        assert channel is not None
        try:
            told = wire.decode(channel.recv(wire.MAX_LINE_BYTES))
            self._adopt(processes.adopt(int(str(told["pid"]))), channel)
        except (OSError, wire.WireError) as error:
            self.send(wire.encode("unwatch"))
            self._drop_channel()
            if wanted:  # a job that ends in its first second ends monitors that are about to start
                self._on_failure(error)

    def _replace(self, what: str) -> None:
        delay_s = self._spawn_later()
        log.warning("%s; its rank goes on, a new one starts in %g s", what, delay_s)

    def _on_exit(self, pid: int, code: int) -> None:
        if not self._closed:
            self._replace(f"rank monitor {self.local_rank} (pid {pid}) ended with {code}")

    def _on_message(self, data: bytes) -> None:
        message, life = wire.decode(data), self._life
        if life is None or life.watch is None:
            return
        current = wire.decode(life.watch)
        if (message.get("cycle"), message.get("pid")) != (current["cycle"], current["pid"]):
            return
        if message["type"] == "hang" and not life.hung:
            life.hung = True  # a monitor restarted in mid-kill says it again
            self._on_hang(self.local_rank, message)
        elif message["type"] == "inspected":
            self._end_inspections(message)
        elif message["type"] == "control":
            description = str(message["description"]).encode("utf-8", "replace").decode()  # no lone surrogates
            if message["action"] == wire.LOADED:
                with contextlib.suppress(ValueError, ProtocolError):  # a rank may write anything
                    self._on_loaded(from_plain(json.loads(description), t.Loaded))
            else:
                self._on_asked(self.local_rank, t.WorkloadAction[str(message["action"])], description)
