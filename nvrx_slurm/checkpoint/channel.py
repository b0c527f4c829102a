"""The way between the keepers of two nodes: TLS, by which both ends prove that they hold the job's token."""

from __future__ import annotations

import fcntl
import socket
import ssl
import struct
from contextlib import AbstractContextManager, suppress
from typing import Any

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.control.identity import JobIdentity
from nvrx_slurm.errors import ProtocolError

PROOF_S = 5.0  # for the whole handshake
_LENGTH = struct.Struct("!I")
_SIOCGIFADDR = 0x8915  # netdevice(7)
_IFREQ = struct.Struct("256s")
_ADDRESS = slice(20, 24)  # in its answer
_MOVE_S = 30.0  # for one message or block
_BACKLOG = 16


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        found = fcntl.ioctl(one, _SIOCGIFADDR, _IFREQ.pack(interface.encode()[:15]))
    return socket.inet_ntoa(found[_ADDRESS])


class Channel(AbstractContextManager["Channel"]):
    """A connection to another keeper of the job, which it closes. Raises OSError, from a thread that may wait."""

    def __init__(self, connection: socket.socket, identity: JobIdentity, is_server: bool) -> None:
        connection.settimeout(PROOF_S)
        context = identity.server if is_server else identity.client
        self._tls = context.wrap_socket(connection, server_side=is_server)
        if self._tls.getpeercert(binary_form=True) != identity.certificate:
            self._tls.close()
            raise ssl.SSLError("it belongs to another job")
        self._tls.settimeout(_MOVE_S)
        self.read_into, self.write = self._tls.recv_into, self._tls.sendall

    def __exit__(self, *_: object) -> None:
        self._tls.close()

    def tell(self, message: Any) -> None:
        """Send a message."""
        frame = m.between.encode(message)
        self.write(_LENGTH.pack(len(frame)) + frame)

    def hear(self) -> Any:
        """The next message."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > m.MAX_PACKET_BYTES:
            raise OSError("it sends what is no message")
        try:
            return m.between.decode(self._exactly(length))
        except ProtocolError as error:
            raise OSError(str(error)) from None

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            some = self._tls.recv(length - len(data))
            if not some:
                raise OSError("the other keeper has closed the connection")
            data += some
        return bytes(data)


def listening(address: str, port: int) -> socket.socket:
    """At this port, or at another one where it is taken."""
    for one in (port, 0):
        with suppress(OSError):
            return socket.create_server((address, one), backlog=_BACKLOG)
    raise OSError(f"no port of {address} is free")
