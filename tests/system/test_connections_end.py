"""Waiting for the end of connections whose port somebody else takes at once."""

from __future__ import annotations

import socket

from nvrx_slurm.system import connections

WAIT_S = 30.0


def test_the_end_of_a_connection_is_seen_though_another_server_is_at_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        host, port = first.getsockname()
        with socket.create_connection((host, port)):
            theirs, _ = first.accept()
            ours = connections.to_port(port)
            assert len(ours) == 1
            assert not connections.await_end(ours, 0.0)
            first.close()
            theirs.close()
            with socket.create_server((host, port)):
                assert connections.await_end(ours, WAIT_S)
    assert connections.await_end(ours, 0.0)  # not there any more
