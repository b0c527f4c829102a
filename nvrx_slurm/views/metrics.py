"""`nvrx metrics`: the metrics of all jobs of log trees for Prometheus; it reads files, and asks no job and no Slurm.

A thread for each --log-dir reads; a scrape gets what was read last. So a file system that hangs holds one thread, and
a client one of _MOST_CLIENTS places. Where all are taken, the oldest client goes.
"""

from __future__ import annotations

import glob
import os
import signal
import socket
import socketserver
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import click

from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.core.samples import TEXT, Sample, exposition, line, samples
from nvrx_slurm.errors import ExitCode, UsageError
from nvrx_slurm.system import bounded
from nvrx_slurm.system.foreign import names_in
from nvrx_slurm.views.log_tree import log_dir, result_of, runs_of
from nvrx_slurm.views.status import VERSION, content

# how long a run is shown after its end, or its silence (intervals)
_ENDED_S, _SILENT_S, _SILENT = 600.0, 86400.0, 3
_FORGET_S = 3600.0  # a job may be suspended for longer than _SILENT_S
_TREE_S = 30.0  # for the jobs of one of them, in one scan
_MOST_BYTES = 16 << 20  # of the text of one user's jobs: of more than 3,000
_ONCE_S = 60.0  # for `nvrx metrics`
_MOST_CLIENTS = 8
_CUT_S = 1.0  # until a client that goes has left its place
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_HELP = "A log tree; may be a pattern in quotes, as '/home/*/nvrx_logs'; may be repeated (default: that of nvrx-run)."
_places = click.option("--log-dir", "places", multiple=True, metavar="DIR", help=_HELP)


class _Lines(NamedTuple):
    """One run: when its status was written (Unix seconds), and (name, line) of each sample."""

    written: float
    lines: tuple[tuple[str, str], ...]


_Runs = dict[tuple[str, str], _Lines]  # by job and run


class Trees:
    """The runs of the log trees that `pattern` means. One thread scans, others read `runs` and `own`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.runs: _Runs = {}
        self.own: tuple[tuple[str, str], ...] = ()
        # jobs of which nothing is shown: path -> mtime (ns), until `_forget_at`
        self._over: dict[str, int] = {}
        self._forget_at = 0.0
        self._ends = 0.0  # of the tree that is read: time.monotonic()

    def scan(self) -> None:
        """Read all that may have changed. Raises OSError."""
        began = time.monotonic()
        now = time.time()
        unreadable = 0
        runs: _Runs = {}
        used = Counter[int]()  # bytes, by the owner of the jobs
        if now > self._forget_at:
            self._over = {}
            self._forget_at = now + _FORGET_S
        for job, mtime, owner in self._jobs():
            shown = 0
            for latest, run in enumerate(reversed(runs_of(job))):
                if time.monotonic() > self._ends:
                    shown = 1  # perhaps
                    break
                try:
                    found = _current(run, now, latest == 0)
                    if found is not None:
                        used[owner] += _keep(runs, found, _MOST_BYTES - used[owner])
                        shown += 1
                except FileNotFoundError:
                    shown += latest == 0 and now - mtime / 1e9 < _SILENT_S  # it has just begun
                except DAMAGE:
                    unreadable += 1
                    shown += 1
            if not shown:
                self._over[str(job)] = mtime
        values = {
            "scan_timestamp_seconds": now,
            "scan_duration_seconds": time.monotonic() - began,
            "runs": len(runs),
            "unreadable_runs": unreadable,
        }
        labels = {"log_dir": self.pattern}
        own = [
            Sample(f"nvrx_exporter_{name}", labels, float(value)) for name, value in values.items()
        ]
        self.runs, self.own = runs, tuple((one.name, line(one)) for one in own)

    def _jobs(self) -> Iterator[tuple[Path, int, int]]:
        """Jobs of which something may be shown, with mtime (ns) and owner.

        One that is over comes back when it has a further run.
        A tree that takes longer than _TREE_S is left: what is over is passed over the next time.
        """
        for tree in glob.iglob(self.pattern):
            self._ends = time.monotonic() + _TREE_S
            for name in names_in(tree):
                if time.monotonic() > self._ends:
                    break
                with suppress(OSError):
                    job = os.path.join(tree, name)
                    status = os.lstat(job)
                    mtime = status.st_mtime_ns
                    if stat.S_ISDIR(status.st_mode) and self._over.get(job) != mtime:
                        yield Path(job), mtime, status.st_uid


def _keep(runs: _Runs, found: dict[str, Any], most: int) -> int:
    """Add what is shown of a run, at most `most` bytes; returns how many it has. Raises some of DAMAGE."""
    told = samples(found)
    lines = _Lines(found["written"], tuple((one.name, line(one)) for one in told))
    size = sum(len(text) for _, text in lines.lines)
    if size > most:
        raise ValueError("its user has too many jobs")
    who = told[0].labels["job_id"], told[0].labels["run"]
    runs[who] = max(lines, runs.get(who, lines))
    return size


def _current(run: Path, now: float, latest: bool) -> dict[str, Any] | None:
    """The status of a run, if it is to be shown: it is alive, has ended just now, or is silent and the `latest` of its
    job. Raises some of DAMAGE."""
    found = content(run)
    if found["version"] > VERSION:
        raise ValueError("a later version")
    age_s = now - found["written"]
    is_silent = age_s > _SILENT * found["interval_s"]
    if found["state"] != "ended" and is_silent and (result := result_of(run)):
        # ended by Slurm, with all of its coordinators
        age_s = now - (run / "result.json").lstat().st_mtime
        found |= {"state": "ended", "end": {"code": int(result["code"])}}
    if found["state"] == "ended":
        return found if age_s < _ENDED_S else None
    return found if not is_silent or (latest and age_s < _SILENT_S) else None


def _text(trees: Iterable[Trees]) -> bytes:
    """The text of a scrape. Of runs with equal names the one that was written last is shown."""
    runs: _Runs = {}
    lines: list[tuple[str, str]] = []
    for tree in trees:
        lines += tree.own
        for who, run in tree.runs.items():
            runs[who] = max(run, runs.get(who, run))
    lines += (one for run in runs.values() for one in run.lines)
    return exposition(lines)


@click.group(invoke_without_command=True)
@_places
@click.pass_context
def metrics(ctx: click.Context, places: tuple[str, ...]) -> None:
    """Print the metrics of the jobs that run, or ended within 10 min, in the text format of Prometheus."""
    if ctx.invoked_subcommand is not None:
        ctx.obj = places
        return
    trees = [Trees(place) for place in dict.fromkeys(places or (str(log_dir()),))]
    for tree in trees:
        try:
            bounded.call(tree.scan, _ONCE_S, tree.pattern)
        except bounded.Overrun as error:
            click.echo(f"nvrx metrics: {error}", err=True)
            sys.exit(ExitCode.FAILED)
    sys.stdout.buffer.write(_text(trees))


@metrics.command()
@_places
@click.option(
    "--address", default="127.0.0.1", help="Where to listen (default: on this machine only)."
)
@click.option(
    "--port",
    default=9489,
    type=click.IntRange(0, 65535),
    help="0: any that is free (default: 9489).",
)
@click.option(
    "--every", "every_s", default=10.0, type=click.FloatRange(0.1, 3600.0), metavar="S",
    help="Read the log trees every S seconds (default: 10).",
)  # fmt: skip
@click.pass_obj
def serve(
    inherited: tuple[str, ...], places: tuple[str, ...], address: str, port: int, every_s: float
) -> None:
    """Serve the metrics of all jobs over HTTP, path /metrics.

    One for a cluster is enough. There is no encryption and no password: who reaches the port sees the names of jobs
    and users.
    """
    trees = [Trees(place) for place in dict.fromkeys((*inherited, *places) or (str(log_dir()),))]
    _serve(trees, (address, port), every_s)


def _serve(trees: list[Trees], place: tuple[str, int], every_s: float) -> None:
    try:
        server = Server(place, trees)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {place[0]} port {place[1]}: {error.strerror}; give another --address or --port"
        ) from None
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # before the first thread begins
    for tree in trees:
        threading.Thread(target=_scan, args=(tree, every_s), daemon=True).start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host, bound = server.server_address[:2]
    host = str(host)
    click.echo(f"nvrx metrics: http://{f'[{host}]' if ':' in host else host}:{bound}/metrics")
    sys.stdout.flush()
    signal.sigwait(_STOPPING)


def _scan(tree: Trees, every_s: float) -> None:
    """Scan for ever, in a thread of its own."""
    while True:
        with suppress(OSError):  # the time of the last scan stays, and tells
            tree.scan()
        time.sleep(every_s)


class Server(socketserver.ThreadingTCPServer):
    """Answers scrapes, each in a thread. Raises OSError where it cannot listen."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, place: tuple[str, int], trees: list[Trees]) -> None:
        self.trees = trees
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._clients = dict[Any, None]()  # the oldest first
        self.address_family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        super().__init__(place, _Scrape)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a place for this client."""
        if len(self._clients) >= _MOST_CLIENTS:
            oldest = next(iter(self._clients.copy()), request)
            with suppress(OSError):  # it has ended just now
                oldest.shutdown(socket.SHUT_RDWR)
        found = self._places.acquire(timeout=_CUT_S)
        if found:
            self._clients[request] = None
        return found

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a thread. Raises RuntimeError where none can be made."""
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            self._free(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a client, and free its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free(request)

    def _free(self, request: Any) -> None:
        self._clients.pop(request)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that left."""


class _Scrape(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        is_there = self.path.partition("?")[0] == "/metrics"
        body = _text(self.server.trees) if is_there else b"the metrics are at /metrics\n"
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Type", TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, form: str, *values: object) -> None:
        """Requests are not logged."""
