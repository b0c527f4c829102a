"""Bytes over TCP of a process, as the kernel counts them for each socket (sock_diag(7), `struct tcp_info`).

Reads and writes by recv(2) and send(2) are in no file of /proc/PID.
"""

from __future__ import annotations

import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ESTABLISHED = 1 << 1
_INFO = 2  # INET_DIAG_INFO, of what is asked for by bit and told by attribute
_ERROR, _DONE = 2, 3
_MESSAGE = struct.Struct("=LHH8x")  # struct nlmsghdr
_ASKED = struct.Struct("=BBBxL48x")  # struct inet_diag_req_v2
_INODE_AT, _TOLD_BYTES = 68, 72  # struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr
_BYTES_AT = 120  # of tcpi_bytes_acked and tcpi_bytes_received
_BYTES = struct.Struct("=QQ")
_TIMEOUT_S = 0.2
_PART_BYTES = 1 << 16


def moved(pids: Collection[int]) -> int:
    """Bytes that these processes have sent and received over connections that are open now; 0 = not known."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    if not inodes:
        return 0
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_TIMEOUT_S)
            return _dump(kernel, socket.AF_INET, inodes) + _dump(kernel, socket.AF_INET6, inodes)
    except (OSError, struct.error):
        return 0


def _inodes(pid: int) -> Iterator[int]:
    """The inode numbers of a process's sockets."""
    try:
        links = [
            os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")
        ]
    except OSError:  # it ends, or is another user's
        return
    for link in links:
        if link.startswith("socket:["):
            yield int(link[8:-1])


def _dump(kernel: socket.socket, family: int, inodes: set[int]) -> int:
    """Of all that are connected, the bytes of those sockets."""
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    size = _MESSAGE.size + len(asked)
    kernel.send(_MESSAGE.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP) + asked)
    total = 0
    while True:
        for kind, told in _parts(kernel.recv(_PART_BYTES), _MESSAGE):
            if kind in (_ERROR, _DONE):
                return total
            (inode,) = struct.unpack_from("=L", told, _INODE_AT)
            more = told[_TOLD_BYTES:] if inode in inodes else b""
            for what, info in _parts(more, _ATTRIBUTE):
                total += sum(_BYTES.unpack_from(info, _BYTES_AT)) if what == _INFO else 0


def _parts(data: bytes, header: struct.Struct) -> Iterator[tuple[int, bytes]]:
    """Kind and content of what begins with its length and kind, one after another."""
    while len(data) >= header.size:
        length, kind = header.unpack_from(data)[:2]
        yield kind, data[header.size : length]
        data = data[max(header.size, (length + 3) & ~3) :]
