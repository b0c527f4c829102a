"""What a worker asks of the job is passed on to the agent, but never so much of it that the agent's channel is full.

The channel holds what the agent has not read yet, because it is busy or stopped. `Continue` is for the log only and
uses no more than a part of it. The rest is for what matters, and it suffices: in one life of a worker each of
ExcludeThisNode, ShutdownWorkload and the monitor's own `hang` goes there once, in messages of 50 KB at most.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios

from nvrx_slurm.monitor import wire

MAX_CONTINUES = 100  # of one life of a worker; the log needs no more of them
CHANNEL_BYTES = 1 << 18  # of which Linux gives at least 200 KB by default
_CONTINUES_BYTES = 1 << 15  # a Continue is passed on while no more than this waits for the agent

_CONTINUE, *_ = wire.ACTIONS


def widen(channel: socket.socket) -> None:
    """Make room in a new channel, whatever the default of this machine."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHANNEL_BYTES)


class Forwarding:
    """What one life of a worker may still ask: few Continues, and of the rest only what is stronger than before."""

    def __init__(self) -> None:
        self._continues = 0
        self._strongest = 0

    def wants(self, action: str, channel: socket.socket) -> bool:
        """Whether this request (one of wire.ACTIONS) is to be passed on now; otherwise nothing would follow from it."""
        if action != _CONTINUE:
            return wire.ACTIONS.index(action) > self._strongest
        return self._continues < MAX_CONTINUES and _waiting_bytes(channel) <= _CONTINUES_BYTES

    def passed_on(self, action: str) -> None:
        """The channel has taken it."""
        if action == _CONTINUE:
            self._continues += 1
        else:
            self._strongest = wire.ACTIONS.index(action)


def _waiting_bytes(channel: socket.socket) -> int:
    """What the agent has not read, as the kernel accounts for it: 768 bytes for the shortest message."""
    waiting: int = struct.unpack("i", fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(4)))[0]
    return waiting
