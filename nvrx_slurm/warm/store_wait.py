"""Lets a rank find rank 0's store as soon as that serves.

In `init_process_group` all ranks connect to a server that rank 0 starts. Where one is refused, torch tries again after
0.25 to 0.75 s (`ExponentialBackoffWithJitter` in its c10d). Ranks that were forked come within milliseconds of each
other, so most of them are refused. So a rank looks for the server first, with shorter pauses, and then does as before.

Part of a worker's start-up, see `hook.py`; imports only what every interpreter has loaded.
"""

import sys
from time import monotonic, sleep

_MODULE = "torch.distributed.rendezvous"
_WAIT_S = 1.0  # after that torch's own pauses do
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.1


def wait_for_store_first():
    """Wait for the server before torch connects to it, if torch has the function that does."""
    rendezvous = sys.modules.get(_MODULE)
    create = getattr(rendezvous, "_create_c10d_store", None)
    socket = sys.modules.get("socket")  # torch has imported it
    if create is None or socket is None:
        return

    def create_store(*args, **named):
        where = args[:2]
        # Where a later torch passes other arguments, no rank waits.
        rank = args[2] if len(args) > 2 else 0
        if rank:
            _wait_for_server(socket, where)
        return create(*args, **named)

    rendezvous._create_c10d_store = create_store


def _wait_for_server(socket, where):
    """Return when the host answers anything but a refusal, and after a second."""
    until = monotonic() + _WAIT_S
    pause_s = _FIRST_PAUSE_S
    while monotonic() < until:
        try:
            socket.create_connection(where, _WAIT_S).close()
        except ConnectionRefusedError:
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        except Exception:  # whatever is wrong with the address, torch says it
            return
        else:
            return
