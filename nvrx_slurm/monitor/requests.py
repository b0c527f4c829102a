"""The rank's requests to its monitor: one datagram in, with a socket for the answer.

There are no connections. A request that a killed monitor has not read waits for its successor; one that it has read is
sent again, because the socket for the answer is closed. Only processes of the same user and root get an answer.
"""

from __future__ import annotations

import os
import socket
import struct

from nvrx_slurm.monitor import wire

_SENTENCE_CHARS = 500  # of a refusal, which may quote the peer: it must fit into one message
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred
_FD = struct.Struct("=i")
# descriptors beyond this room are dropped by the kernel
_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_FD.size)

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is too heavy for this process
    from collections.abc import Callable

    Answer = Callable[[dict[str, object], int], tuple[bytes, list[int]]]


def serve(listener: socket.socket, answer: Answer) -> None:
    """Answer one request, if there is one, at a socket for datagrams with SO_PASSCRED. Nothing here blocks.

    `answer(message, pid)` returns the reply and the fds to send with it, or raises WireError. `pid` is the sender's, 0
    if it is of another pid namespace.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        request, parts, _, _ = listener.recvmsg(wire.MAX_LINE_BYTES + 1, _SPACE, flags)
    except OSError:
        return
    found = {kind: data for _, kind, data in parts}
    pid, uid, _ = _CREDENTIALS.unpack(found[socket.SCM_CREDENTIALS])
    fds = [fd for (fd,) in _FD.iter_unpack(found.get(socket.SCM_RIGHTS, b""))]
    if fds and uid in (0, os.geteuid()):
        reply, with_it = _reply(request, pid, answer)
        try:
            with socket.socket(fileno=os.dup(fds[0])) as back:
                socket.send_fds(back, [reply], with_it, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it is no socket, or the peer does not read its answer
    for fd in fds:
        os.close(fd)


def _reply(request: bytes, pid: int, answer: Answer) -> tuple[bytes, list[int]]:
    try:
        return answer(wire.decode(request), pid)
    except wire.WireError as error:
        return wire.encode("error", error=str(error)[:_SENTENCE_CHARS]), []
