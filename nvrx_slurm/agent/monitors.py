"""The agent's side of a rank monitor: spawn it, hand it each worker, hear of hangs, replace it when it dies, reap it.

Everything runs on the agent's asyncio loop; nothing blocks for longer than a spawn (about 1 ms). The shared page and
the socket of the rank must survive the monitor's process. They are made and kept here, and lent to it with `watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.agent.monitor_life import Life, socket_prefix
from nvrx_slurm.core.rank import watch as core
from nvrx_slurm.errors import UsageError
from nvrx_slurm.monitor import wire
from nvrx_slurm.monitor.page import INIT, LEAVES, WARNED, Page, PageError
from nvrx_slurm.system import processes

log = logging.getLogger(__name__)

SOCKET_ENV = "FT_RANK_MONITOR_IPC_SOCKET"
CLOSE_TIMEOUT_S = 1.0  # for a monitor to end on `quit`; then it is killed

# One that dies young is replaced after 0, 0.1, 0.2, ... s: at once after a stray kill, rarely if it cannot run here.
_YOUNG_S = 10.0
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0


_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from nvrx_slurm.monitor.main import main; sys.exit(main(sys.argv[2:]))"
)

OnHang = Callable[[int, dict[str, Any]], None]
OnAsked = Callable[[int, "t.WorkloadAction", str], None]


class RankMonitor:
    """The monitor of one local rank over all cycles. All methods belong to the thread of the running event loop.

    `private_dir`: a directory of this agent with mode 0700 (checked; UsageError). `on_hang(local_rank, message)` is
    called once per worker that the monitor found hung and is about to end (see hear()); `message` is the monitor's
    `hang`: cycle, rank, local_rank, pid, sentence, deadline_s and at_s (monotonic seconds).
    `on_asked(local_rank, action, description)` is called for each workload control request of the worker (twice if the
    monitor was killed just then), before its exit is seen.

    start(); then per cycle: worker_env() -> spawn the worker as a session leader -> watch() -> its exit is seen ->
    hear() -> unwatch(); in the end close().
    """

    def __init__(self, local_rank: int, private_dir: Path, on_hang: OnHang, on_asked: OnAsked) -> None:
        self._local_rank = local_rank
        self._dir = Path(private_dir)
        self._on_hang = on_hang
        self._on_asked = on_asked
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lives = 0
        self._life: Life | None = None
        self._child: processes.Child | None = None
        self._control: socket.socket | None = None
        self._spawned_s = 0.0
        self._delay_s = 0.0
        self._respawn: asyncio.TimerHandle | None = None
        self._closing: asyncio.Event | None = None

    @property
    def pid(self) -> int | None:
        """The monitor's process id, None while there is none."""
        return self._child.pid if self._child else None

    def start(self, spawn: bool = True) -> None:
        """Make its socket and spawn the process, unless that is left to spawn().

        Raises UsageError (bad directory); after that nothing about a monitor is an error.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._check_dir()
        except FileNotFoundError:
            pass  # cleared away already: _make_life() makes it anew
        try:
            self._life = self._make_life()
        except OSError as error:
            self._say_unmonitored(error)
        if spawn:
            self.spawn()

    def worker_env(self) -> dict[str, str]:
        """Variables for the next worker; ask again after each unwatch(), because the socket is new then.

        Without SOCKET_ENV if the rank cannot be monitored this time.
        """
        assert self._loop is not None, "start() first"
        if self._life is None or not self._life.path.exists():
            self._new_life()
        env = {} if self._life is None else {SOCKET_ENV: os.fspath(self._life.path)}
        if "PYTHONFAULTHANDLER" not in os.environ:
            env["PYTHONFAULTHANDLER"] = "1"
        return env

    def watch(
        self,
        *,
        pid: int,
        pidfd: int,
        cycle: int,
        rank: int,
        limits: Mapping[str, Any],
        signum: int = signal.SIGKILL,
        cfg: Mapping[str, Any] | None = None,
    ) -> None:
        """Watch the worker just spawned with worker_env().

        `pid`: a session leader; `pidfd` stays the caller's. `limits`: by the names of `core.rank.watch.Limits`, None or
        absent = no limit. `signum`: rank_termination_signal. `cfg`: further settings for the rank's `client.cfg`
        (JSON). Raises ValueError for a bad limit and for settings over 64 KiB; nothing has changed then.
        """
        assert self._loop is not None, "start() first"
        life = self._life
        core.Limits(**limits)
        settings = {**(cfg or {}), **limits, "rank_termination_signal": int(signum)}
        message = wire.encode(
            "watch",
            cycle=cycle,
            rank=rank,
            local_rank=self._local_rank,
            pid=pid,
            started_s=time.monotonic(),
            limits=dict(limits),
            signal=int(signum),
            cfg=settings,
        )
        if life is None:
            return  # was said when it could not be made
        if life.pidfd >= 0:
            os.close(life.pidfd)
            life.pidfd = -1
        try:
            life.pidfd = os.dup(pidfd)
        except OSError as error:
            self._say_unmonitored(error)
            return
        life.watch, life.hung = message, False
        self._send(message, life.fds())

    def warn(self) -> None:
        """Have `RankMonitorClient.should_stop()` say yes in the worker that is watched, now or when it asks first."""
        page = self._page()
        if page is not None:
            page.words[WARNED] = page.words[WARNED] or time.monotonic_ns()
            page.close()

    @property
    def leaves(self) -> bool:
        """Whether should_stop() has said yes to the worker; ask before unwatch()."""
        return self._is_set(LEAVES)

    @property
    def connected(self) -> bool:
        """Whether the worker has called init_workload_monitoring(); ask before unwatch()."""
        return self._is_set(INIT)

    def _is_set(self, word: int) -> bool:
        page = self._page()
        if page is None:
            return False
        found = page.words[word] != 0
        page.close()
        return found

    def unwatch(self) -> None:
        """The worker is gone (or no longer to be judged): forget it, and make ready for the next."""
        self._send(wire.encode("unwatch"))
        self._new_life()

    async def close(self) -> None:
        """End and reap the monitor and remove its socket; at most 2 x CLOSE_TIMEOUT_S. The worker is left alone."""
        self._closing = asyncio.Event()
        if self._respawn is not None:
            self._respawn.cancel()
        child = self._child
        if child is not None:
            self._send(wire.encode("unwatch"))
            self._send(wire.encode("quit"))
            ended = asyncio.ensure_future(self._closing.wait())
            await asyncio.wait({ended}, timeout=CLOSE_TIMEOUT_S)
            if not ended.done():
                child.signal_group(signal.SIGKILL)
                await asyncio.wait({ended}, timeout=CLOSE_TIMEOUT_S)
            if not ended.done():
                ended.cancel()
                log.error("rank monitor %d (pid %d) does not end after SIGKILL", self._local_rank, child.pid)
        if self._life is not None:
            self._life.close()
            self._life = None

    def _page(self) -> Page | None:
        """The worker's page; None where it is not monitored, or where its rank has overwritten the page."""
        if self._life is None or self._life.broken:
            return None
        try:
            return Page(self._life.page_fd)
        except (OSError, PageError) as error:  # no memory; or not our page any more
            self._life.broken = True
            self._say_unmonitored(error)
            return None

    # --- the process ------------------------------------------------------------------------------

    def _check_dir(self) -> None:
        status = self._dir.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or stat.S_IMODE(status.st_mode) & 0o077:
            raise UsageError(
                f"{self._dir} must belong to this user alone (mode 0700) to hold the rank monitors' sockets"
            )

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
        self._lives += 1
        try:
            return Life(self._dir, self._local_rank, self._lives - 1)
        except FileNotFoundError:
            self._remake_dir()
            return Life(self._dir, self._local_rank, self._lives - 1)

    def _remake_dir(self) -> None:
        """An epilog or a tmp cleaner has removed the directory: make it anew at the same path."""
        with contextlib.suppress(FileExistsError):  # another monitor of this agent was first; or it is not ours
            self._dir.mkdir(0o700)
        self._check_dir()

    def _say_unmonitored(self, error: Exception) -> None:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        log.warning("local rank %d goes on without its monitor (%s: %s)", self._local_rank, self._dir, why)

    def spawn(self) -> None:
        """Start a monitor and give it what there is to watch; if that fails, try again later."""
        assert self._loop is not None
        self._respawn = None
        self._spawned_s = time.monotonic()
        try:
            self._child, self._control = self._popen()
        except OSError as error:
            self._spawn_later(f"rank monitor {self._local_rank} cannot be started ({error})")
            return
        self._loop.add_reader(self._child.pidfd, self._on_exit)
        self._loop.add_reader(self._control.fileno(), self.hear)
        if self._life is not None and self._life.watch is not None:
            self._send(self._life.watch, self._life.fds())

    def _popen(self) -> tuple[processes.Child, socket.socket]:
        """The process and our end of its control socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        name = f"nvrx-monitor-{self._local_rank}"
        place = [os.fspath(self._dir), socket_prefix(self._local_rank)]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT, str(theirs.fileno()), name, *place]
        try:
            with theirs:
                return processes.start_directly(command, pass_fds=(theirs.fileno(),)), ours
        except OSError:
            ours.close()
            raise

    def _spawn_later(self, what: str) -> None:
        assert self._loop is not None
        if time.monotonic() - self._spawned_s > _YOUNG_S:
            self._delay_s = 0.0
        log.warning("%s; its rank goes on, a new one starts in %g s", what, self._delay_s)
        self._respawn = self._loop.call_later(self._delay_s, self.spawn)
        self._delay_s = min(max(_FIRST_DELAY_S, 2 * self._delay_s), _LONGEST_DELAY_S)

    def _on_exit(self) -> None:
        assert self._loop is not None and self._child is not None and self._control is not None
        self.hear()  # its last words
        self._loop.remove_reader(self._child.pidfd)
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        child, self._child, self._control = self._child, None, None
        code = child.reap()
        if self._closing is not None:
            self._closing.set()
        else:
            self._spawn_later(f"rank monitor {self._local_rank} (pid {child.pid}) ended with {code}")

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, line: bytes, fds: list[int] | None = None) -> None:
        """To the monitor, if there is one; the next one gets what matters again."""
        if self._control is None or self._child is None:
            return
        try:
            socket.send_fds(self._control, [line], fds or [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._child.signal_group(signal.SIGKILL)  # it has stopped reading; its successor starts from the last watch
        except OSError:
            pass  # it has just died, and _on_exit is about to run

    def hear(self) -> None:
        """Take all that the monitor has said (otherwise done by the loop, in its own time).

        Call it when the worker's exit is seen and before judging it: a monitor reports a hang before it ends the
        worker, so after this on_hang() has been called if that is why it ended; and on_asked() for all it asked for.
        """
        while self._control is not None:
            try:
                line = self._control.recv(wire.MAX_LINE_BYTES)
            except OSError:
                return
            if not line:
                self._stop_reading()
                return
            try:
                message = wire.decode(line)
            except wire.WireError as error:
                log.warning("rank monitor %d says what no monitor says: %s", self._local_rank, error)
                continue
            self._take(message)

    def _stop_reading(self) -> None:
        """The end of its socket: it is dying, which its pidfd will tell; a socket at its end is always readable."""
        assert self._loop is not None and self._control is not None
        self._loop.remove_reader(self._control.fileno())

    def _take(self, message: dict[str, Any]) -> None:
        life = self._life
        if life is None or life.watch is None:
            return
        current = wire.decode(life.watch)
        if (message.get("cycle"), message.get("pid")) != (current["cycle"], current["pid"]):
            return
        if message["type"] == "hang" and not life.hung:
            life.hung = True  # a monitor restarted in mid-kill says it again
            self._on_hang(self._local_rank, message)
        elif message["type"] == "control":
            description = str(message["description"]).encode("utf-8", "replace").decode()  # no lone surrogates
            self._on_asked(self._local_rank, t.WorkloadAction[str(message["action"])], description)
        elif message["type"] == "unmonitored" and not life.broken:
            life.broken = True
            self._say_unmonitored(ValueError(str(message["sentence"])))
