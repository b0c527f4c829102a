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
_ERROR = 2
_DONE = 3
_HEADER = struct.Struct("=LHHLL")  # struct nlmsghdr
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
            families = (socket.AF_INET, socket.AF_INET6)
            return sum(_dump(kernel, family, inodes) for family in families)
    except (OSError, struct.error):
        return 0


def _inodes(pid: int) -> Iterator[int]:
    """The inode numbers of a process's sockets."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            links = [os.readlink(one.path) for one in descriptors]
    except OSError:  # it ends, or is another user's
        return
    for link in links:
        if link.startswith("socket:["):
            yield int(link[8:-1])


def _dump(kernel: socket.socket, family: int, inodes: set[int]) -> int:
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ESTABLISHED)
    size = _HEADER.size + len(asked)
    kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + asked)
    total = 0
    while True:
        part = kernel.recv(_PART_BYTES)
        while part:
            length, kind, _, _, _ = _HEADER.unpack_from(part)
            if kind in (_ERROR, _DONE) or length < _HEADER.size:
                return total
            total += _bytes(part[_HEADER.size : length], inodes)
            part = part[length:]


def _bytes(told: bytes, inodes: set[int]) -> int:
    """The bytes that one socket has acknowledged and received, if its inode is one of these."""
    (inode,) = struct.unpack_from("=L", told, _INODE_AT)
    at = _TOLD_BYTES if inode in inodes else len(told)
    while at + _ATTRIBUTE.size <= len(told):
        length, kind = _ATTRIBUTE.unpack_from(told, at)
        if kind == _INFO:
            return sum(_BYTES.unpack_from(told, at + _ATTRIBUTE.size + _BYTES_AT))
        at += max(4, (length + 3) & ~3)
    return 0
