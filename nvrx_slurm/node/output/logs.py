"""Role: starts and supervises this node's log shipper and, beside the coordinator, the aggregators.

The shipper and the aggregators only read the ranks' log files. If they crash or lag, merged logs are late or
incomplete; the job is unaffected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.child.supervised import PacketProcess
from nvrx_slurm.control.addresses import ANY_ADDRESS
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.declared import Record
from nvrx_slurm.logs.merged import missing_lines
from nvrx_slurm.system import bounded

if TYPE_CHECKING:
    from nvrx_slurm.node.coordination.member_streams import MemberStreams
    from nvrx_slurm.node.job import NodeJob

_CYCLES = 3  # how many cycles a new shipper is told of
_SOCKET = "logs"
_COUNT_S = 5.0
_HASTY_DRAIN_S = 2.0  # for merged logs after a signal: agent and aggregator each wait so long
_BACKLOG = 4096


class LogSpec(Record):
    """What is merged, and where to. Paths have no placeholders any more."""

    prefix: str  # of the files per cycle; "" = none
    logfile: str = ""  # for the launchers' output; "" = none
    port: int = 50051  # tried first
    drain_s: float = 60.0  # at the end of the job
    grpc_port: int = 0  # of NVRx's log service for foreign clients; 0 = none
    batch_s: float = 0.5


class LogsRole:
    """The programs of one node."""

    def __init__(self, spec: LogSpec, job: NodeJob, private_dir: Path, say: Callable[[str], None]) -> None:
        self.spec = spec
        self._node = job.node
        self._run_dir = job.run_dir
        self._say = say
        self._job = "" if job.meeting is None else job.meeting.key  # names it in certificates; "": one node, no network
        self.drain_s = spec.drain_s  # less when the job was ended by a signal
        self._socket = str(private_dir / _SOCKET)
        self._token = ""
        self._where: tuple[str, int] | None = None
        self._cycles: dict[int, dict[str, Any]] = {}  # the last ones: what the shipper was told
        self._over: set[int] = set()
        self._listener: socket.socket | None = None
        self._aggregators: list[PacketProcess] = []
        self._ending: set[asyncio.Task[bool]] = set()
        self._shipper = PacketProcess(
            "log shipper", "nvrx_slurm.logs.shipper", self._shipper_settings, say, self._shipper_state
        )

    async def start(self) -> None:
        """Start the shipper."""
        self._shipper.spawn()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """The shipper is told of a cycle's files, and when no worker writes to them any more."""
        return {ag.StartWorkers: lambda command: self._begin(command.plan), ag.Send: self._on_sent}

    def _on_sent(self, command: ag.Send) -> None:
        message = command.message
        if isinstance(message, (t.Ready, t.Succeeded)) and message.cycle in self._cycles.keys() - self._over:
            self._over.add(message.cycle)
            self._shipper.tell({"over": message.cycle})
        elif isinstance(message, t.RanksFailed):
            self._shipper.tell({"now": True})

    def _begin(self, plan: t.Plan) -> None:
        if not self.spec.prefix:
            return
        stem = self._name(self._run_dir.node_dir(plan.cycle, self._node))
        ranks = range(plan.rank_offset, plan.rank_offset + self._node.nproc)
        files = [(f"{stem}/rank_{rank}.{stream}", rank) for rank in ranks for stream in ("out", "err")]
        packet = {"cycle": plan.cycle, "files": files, "world": plan.world_size}
        self._cycles[plan.cycle] = packet
        for old in sorted(self._cycles)[:-_CYCLES]:
            del self._cycles[old]
            self._over.discard(old)
        self._shipper.tell(packet)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._run_dir.log_dir))

    def last_call(self, hasty: bool) -> None:
        """The job is over, or ends on this node. Shippers wait only for a short time for the aggregator."""
        if hasty:
            self.drain_s = min(self.drain_s, _HASTY_DRAIN_S)
        for one in (self._shipper, *self._aggregators):
            one.start_now()

    async def close(self) -> None:
        """Ship the rest, bounded; tell how much of it was not merged."""
        shipped = await self._shipper.finish(self.drain_s)
        cycles = self._cycles
        self._cycles = {}
        count = partial(missing_lines, self.spec.prefix, self._run_dir.log_dir, cycles.values())
        if not shipped and (lines := await bounded.call_or_none(count, _COUNT_S, "logs")) != 0:
            self._say(f"{lines or 'many'} lines are not in the merged logs; they are in the ranks' own files")

    # --- the shipper ------------------------------------------------------------------------------------------

    def _shipper_settings(self) -> dict[str, Any]:
        return {
            "token": self._token,
            "job": self._job,
            "node": self._node.node_id,
            "log_dir": str(self._run_dir.log_dir),
            "batch_s": self.spec.batch_s,
        }

    def _shipper_state(self) -> Iterator[dict[str, Any]]:
        if self.spec.logfile:
            own = self._name(self._run_dir.launcher_log(self._node))
            yield {"cycle": -1, "files": [(own, -1)], "world": 0}
        for cycle, packet in self._cycles.items():
            yield packet
            if cycle in self._over:
                yield {"over": cycle}
        if self._where is not None:
            yield {"at": self._where, "token": self._token}

    def found(self, host: str, ports: tuple[int, ...], token: str) -> None:
        """The aggregator listens there, at the first port."""
        if not ports or not host:
            return
        where = host, ports[0]
        if (where, token) != (self._where, self._token):
            self._where = where
            self._token = token
            self._shipper.tell({"at": where, "token": token})

    # --- beside the coordinator -------------------------------------------------------------------------------

    def lead(self, members: MemberStreams, term: int, token: str) -> None:
        """This node coordinates the job from now on: start the aggregators."""
        self.retire()
        try:
            self._listener = listener = self._listen()
        except OSError as error:
            return self._say(f"no logs are merged: nothing can listen here: {error.strerror}")
        settings = partial(self._aggregator_settings, term, token)
        name = "log aggregator"
        module = "nvrx_slurm.logs.aggregator"
        self._aggregators.append(PacketProcess(name, module, settings, self._say, listener=listener))
        if self.spec.grpc_port:
            name = "nvrx_service process"
            module = "nvrx_slurm.logs.nvrx_service"
            self._aggregators.append(PacketProcess(name, module, self._service_settings, self._say))
        for one in self._aggregators:
            one.spawn()
        if self._job:
            port = int(listener.getsockname()[1])
            members.tell(t.LogServer(term, (port,)))
            self.found("127.0.0.1", (port,), token)
        else:
            self.found(self._socket, (0,), token)

    def retire(self) -> None:
        """Another node does. Killing the aggregators loses nothing: their files end where their index says."""
        for one in self._aggregators:
            task = asyncio.ensure_future(one.finish(0.0))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        self._aggregators = []
        self._close_listener()

    async def end(self, within_s: float) -> None:
        """The job is over: wait for the shippers of the other nodes, at most that time."""
        await asyncio.gather(*(one.finish(within_s) for one in self._aggregators), *self._ending)
        self._close_listener()

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _listen(self) -> socket.socket:
        """Connections wait here while an aggregator starts, also in place of another. Raises OSError."""
        if not self._job:
            listener = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket)
            listener.bind(self._socket)
            listener.listen(_BACKLOG)
            return listener
        family = socket.AF_INET6 if ":" in ANY_ADDRESS else socket.AF_INET
        make = partial(socket.create_server, family=family, backlog=_BACKLOG, dualstack_ipv6=family is socket.AF_INET6)
        try:
            return make((ANY_ADDRESS, self.spec.port))
        except OSError:  # another job of this host has it
            return make((ANY_ADDRESS, 0))

    def _service_settings(self) -> dict[str, Any]:
        files = filter(None, (self.spec.prefix, self.spec.logfile))
        return {"port": self.spec.grpc_port, "roots": sorted({os.path.dirname(file) for file in files})}

    def _aggregator_settings(self, term: int, token: str) -> dict[str, Any]:
        return {
            "token": token,
            "job": self._job,
            "term": term,
            "owner": f"{self._run_dir.job_id}/{self._run_dir.run}",
            "prefix": self.spec.prefix,
            "logfile": self.spec.logfile,
            "links": str(self._run_dir.path / "merged"),
        }
