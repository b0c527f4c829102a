"""MUNGE through libmunge: every Slurm node has it, and it proves that two processes belong to the same user.

Used once per agent to get the job's token where Slurm started the agents directly (`srun nvrx-run`): there, no
common parent process could make one. See munge_encode(3), munge_ctx_set(3).
"""

from __future__ import annotations

import ctypes
import os

from nvrx_slurm.errors import AuthError

_OPT_SOCKET = 8
_OPT_UID_RESTRICTION = 9
_MAX_CREDENTIAL = 16_384


class Munge:
    """Seals and opens credentials that only processes of this user can make and read."""

    def __init__(self, library: ctypes.CDLL, socket_path: str | None) -> None:
        self._lib = library
        self._lib.munge_ctx_create.restype = ctypes.c_void_p
        self._lib.munge_strerror.restype = ctypes.c_char_p
        self._libc = ctypes.CDLL(None)
        self._socket_path = socket_path

    @classmethod
    def find(cls, socket_path: str | None = None) -> Munge | None:
        """An instance, or None where there is no libmunge. `socket_path`: of a munged that is not the usual one."""
        try:
            return cls(ctypes.CDLL("libmunge.so.2"), socket_path)
        except OSError:
            return None

    @classmethod
    def answers(cls, socket_path: str | None = None) -> bool:
        """Whether there is a libmunge whose munged makes a credential now."""
        munge = cls.find(socket_path)
        try:
            return munge is not None and bool(munge.seal(b""))
        except AuthError:
            return False

    def seal(self, payload: bytes) -> str:
        """A credential around `payload`. Raises AuthError when munged does not answer."""
        context = self._context()
        credential = ctypes.c_char_p()
        try:
            self._check(
                self._lib.munge_encode(ctypes.byref(credential), context, payload, len(payload))
            )
            return (credential.value or b"").decode()
        finally:
            self._libc.free(credential)
            self._lib.munge_ctx_destroy(context)

    def open(self, credential: str) -> bytes:
        """The payload of a credential of this user. Raises AuthError for another user's, a used or an expired one."""
        if len(credential) > _MAX_CREDENTIAL:
            raise AuthError("the MUNGE credential is too long")
        context = self._context()
        buffer = ctypes.c_void_p()
        length = ctypes.c_int()
        uid = ctypes.c_uint32()
        try:
            self._check(
                self._lib.munge_decode(
                    credential.encode(),
                    context,
                    ctypes.byref(buffer),
                    ctypes.byref(length),
                    ctypes.byref(uid),
                    None,
                )
            )
            if uid.value != os.getuid():
                raise AuthError(f"the MUNGE credential is of uid {uid.value}, not {os.getuid()}")
            return ctypes.string_at(buffer, length.value)
        finally:
            self._libc.free(buffer)
            self._lib.munge_ctx_destroy(context)

    def _context(self) -> ctypes.c_void_p:
        context = ctypes.c_void_p(self._lib.munge_ctx_create())
        self._check(
            self._lib.munge_ctx_set(context, _OPT_UID_RESTRICTION, ctypes.c_uint32(os.getuid()))
        )
        if self._socket_path:
            self._check(
                self._lib.munge_ctx_set(
                    context, _OPT_SOCKET, ctypes.c_char_p(self._socket_path.encode())
                )
            )
        return context

    def _check(self, error: int) -> None:
        if error:
            text = self._lib.munge_strerror(error) or b"unknown error"
            raise AuthError(f"MUNGE: {text.decode()}")
