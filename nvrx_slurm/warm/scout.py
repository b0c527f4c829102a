"""Which variables a package sets before it imports torch. Part of `template.py`; standard library only.

A template that has imported torch under other variables forks no worker of a script that imports torch by this package.
"""

import contextlib
import json
import os
import signal
import socket
import sys

from nvrx_exact import ask
from nvrx_process import c_environ, decoded, end_with_parent

_IMPORT_S = 30.0  # until the package imports torch
_MESSAGE_BYTES = 1 << 16


class _Scout:
    """Finder and loader of torch: its execution tells on `channel` what has changed, and ends this process."""

    def __init__(self, channel, journal):
        self._channel = channel
        self._before = c_environ()
        self._finders = [one for one in sys.meta_path if one is not journal]

    def find_spec(self, name, path=None, target=None):
        finders = self._finders if name == "torch" else []
        spec = next(filter(None, (ask(finder, name, path) for finder in finders)), None)
        if spec is not None:
            spec.loader = self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        now = c_environ()
        names = [
            name
            for name in now.keys() | self._before.keys()
            if now.get(name) != self._before.get(name)
        ]
        changes = {name: now.get(name) for name in names}
        self._channel.send(json.dumps(decoded(changes)).encode())
        os._exit(0)


def changes_of(package, journal):
    """Variables with their values (None: not set) that the import of `package` changes before that of torch.

    A copy of this process imports it, and ends. Nothing: it imports no torch, or not within the bound.
    """
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        os.setsid()
        end_with_parent(signal.SIGKILL)
        mine.close()
        sys.meta_path.insert(0, _Scout(its, journal))
        try:
            journal.record(package, (), {})
        finally:
            os._exit(0)
    its.close()
    mine.settimeout(_IMPORT_S)
    with mine, contextlib.suppress(OSError):
        told = mine.recv(_MESSAGE_BYTES)
    with contextlib.suppress(ProcessLookupError):  # it has not got so far
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(told or "{}")
