"""One TLS connection on the running asyncio loop: frames in, frames out, and a bound on everything that it holds.

TLS works on two buffers in memory (ssl.MemoryBIO) rather than on the socket. So this module decides how many bytes a
peer may send before its proof; asyncio's own TLS has no such bound, and keeps 256 KB per connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable

from nvrx_slurm.control.identity import JobIdentity
from nvrx_slurm.errors import AuthError, NvrxError, ProtocolError

MAX_MESSAGE_BYTES = 1 << 20  # both ends refuse longer messages
# that a peer may send before its proof; a handshake takes less than 1 KiB
UNPROVED_BYTES = 16 * 1024
MAX_UNSENT_BYTES = 2 * MAX_MESSAGE_BYTES  # waiting for a slow peer; more means that it is lost
BEAT = b""  # the frame without content: the answer to a beat
AGE = struct.Struct("!xd")  # a beat: no message begins with 0; how long ago the last answer came
_RECORD_BYTES = 16 * 1024  # the longest TLS record
_LENGTH = struct.Struct("!I")
_buffer = memoryview(bytearray(64 * 1024))  # for one read of one stream; emptied before the next


class Stream:
    """A connected, non-blocking socket with TLS.

    `on_proved()`: the peer holds the token. `on_frame(frame)`: a whole frame; a NvrxError that it raises ends the
    stream. `on_end(why)`: called once, last; the peer, a limit or `abort` ended the stream.
    """

    def __init__(
        self,
        connection: socket.socket,
        identity: JobIdentity,
        server_side: bool,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[Exception], None],
        on_proved: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self._fd = (
            connection,
            connection.fileno(),
        )  # asyncio is slower with sockets than with numbers
        self._certificate = identity.certificate
        self._on_frame, self._on_end, self._on_proved = on_frame, on_end, on_proved
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = identity.server if server_side else identity.client
        self._tls = context.wrap_bio(self._in, self._out, server_side)
        self._allowed = UNPROVED_BYTES  # before the proof
        self._proved = self._finishing = self._ended = False
        self._frames = bytearray()  # decrypted, not yet a whole frame
        self._unsent = bytearray()  # encrypted
        self._loop.add_reader(self._fd, self._on_readable)
        if server_side:
            self._on_readable()
        else:
            self._work()

    @property
    def addresses(self) -> tuple[str, str]:
        """The IP addresses of this host and of the other one on the connection; "" once it is closed."""
        try:
            return str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])
        except OSError:
            return "", ""

    def send(self, frame: bytes) -> None:
        """Send a frame. After `finish`, and after the end, it is dropped."""
        if not self._proved or self._finishing or self._ended:
            return
        rest = memoryview(_LENGTH.pack(len(frame)) + frame)
        while rest:
            rest = rest[self._tls.write(rest[:_RECORD_BYTES]) :]
        self._flush()

    def finish(self, within_s: float) -> None:
        """Deliver what was sent, then end: when the peer closes its side too, or after `within_s` seconds."""
        if self._finishing or self._ended:
            return
        self._finishing = True
        self._loop.call_later(within_s, self.abort, ConnectionError("it was closed"))
        if not self._unsent:
            self._shut()

    def abort(self, why: Exception) -> None:
        """End at once."""
        if self._ended:
            return
        self._ended = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._on_end(why)

    # --- what arrives ---------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            size = self._socket.recv_into(_buffer if self._proved else _buffer[: self._allowed])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            return self.abort(ConnectionError(f"its connection broke ({error.strerror})"))
        if size == 0:
            return self.abort(ConnectionError("its connection was closed"))
        if self._finishing:
            return  # a socket closed with unread bytes would destroy what the peer has not read
        self._in.write(_buffer[:size])
        if not self._proved:
            self._allowed -= size
        self._work()

    def _work(self) -> None:
        try:
            if not self._proved:
                self._shake_hands()
            if self._proved:
                self._read()
        except (ssl.SSLError, NvrxError) as error:
            with contextlib.suppress(OSError):
                self._socket.send(self._out.read())  # the alert
            self.abort(_explained(error) if isinstance(error, ssl.SSLError) else error)
        if not self._ended:
            self._flush()

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            if self._allowed <= 0:
                raise ProtocolError(f"it sent {UNPROVED_BYTES} bytes without a proof") from None
            return
        if self._tls.getpeercert(True) != self._certificate:
            raise AuthError("its certificate is not that of this job")
        self._proved = True
        self._on_proved()

    def _read(self) -> None:
        while not (self._ended or self._finishing):
            try:
                self._frames += self._tls.read(_RECORD_BYTES)
            except ssl.SSLWantReadError:
                return
            self._split()
            if not (self._in.pending or self._tls.pending()):
                return  # asking once more would cost as much as a beat

    def _split(self) -> None:
        frames = self._frames
        at = 0
        while len(frames) - at >= _LENGTH.size and not (self._ended or self._finishing):
            (size,) = _LENGTH.unpack_from(frames, at)
            if size > MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"it sent a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
                )
            end = at + _LENGTH.size + size
            if len(frames) < end:
                break
            self._on_frame(bytes(frames[at + _LENGTH.size : end]))
            at = end
        del frames[:at]

    # --- what is sent ---------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._out.pending:
            return
        waits = bool(self._unsent)
        self._unsent += self._out.read()
        if not waits:
            self._send_some()
            if self._unsent and not self._ended:
                self._loop.add_writer(self._fd, self._on_writable)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.abort(ConnectionError(f"it did not take {MAX_UNSENT_BYTES >> 20} MiB of messages"))

    def _send_some(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.abort(ConnectionError(f"its connection broke ({error.strerror})"))

    def _on_writable(self) -> None:
        self._send_some()
        if not self._unsent and not self._ended:
            self._loop.remove_writer(self._fd)
            if self._finishing:
                self._shut()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def _explained(error: ssl.SSLError) -> NvrxError:
    reason = (error.reason or "TLS ended").replace("_", " ").lower()
    if "certificate" in reason or "alert unknown ca" in reason:
        return AuthError("it belongs to another job, or does not hold this job's token")
    return ProtocolError(f"it does not speak the protocol of this job's agents ({reason})")
