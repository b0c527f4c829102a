"""NVRx's gRPC log protocol: our service and client, alone and with the real peers of the 0.7.0 wheel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import nvrx_wheel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_harness import WAIT_S, Program, stage

from nvrx_slurm.logs import nvrx_client, nvrx_wire


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Our service: its address, and the folder that it may write to."""
    root = tmp_path / "allowed"
    root.mkdir()
    program = Program("nvrx_service", {"roots": [str(root)], "port": 0})
    try:
        yield f"127.0.0.1:{program.packet('port')}", root
        assert program.finish(2.0) == 0
    finally:
        program.close()


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The wheel's server: its address, and the folder that it may write to."""
    wheel, root = nvrx_wheel.unpacked(), tmp_path / "allowed"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.grpc_log_server", "--host", "127.0.0.1"]
    program += ["--port", str(port), "--allowed-root", str(root), "--graceful-shutdown-timeout", "1"]
    with subprocess.Popen(program, env={**os.environ, "PYTHONPATH": str(wheel)}, stderr=subprocess.DEVNULL) as server:
        yield f"127.0.0.1:{port}", root
        server.terminate()
        server.wait(WAIT_S)


@given(st.text(max_size=300), st.binary(max_size=70_000), st.text(max_size=300))
def test_messages_come_back_as_they_were(node: str, data: bytes, path: str) -> None:
    chunk = nvrx_wire.LogChunk(node, data, path)
    assert nvrx_wire.decode_chunk(chunk.encode()) == chunk
    assert nvrx_wire.received(nvrx_wire.stream_response("OK", len(data))) == ("OK", len(data))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_chunk_or_an_error(message: bytes) -> None:
    try:
        nvrx_wire.decode_chunk(message)
    except ValueError:
        return


@given(st.lists(st.integers(0, 300_000), max_size=4))
def test_pieces_are_whole_lines_and_all_of_them(sizes: list[int]) -> None:
    text = b"".join(b"x" * size + b"\n" for size in sizes)
    found = list(nvrx_client.pieces(text))
    assert b"".join(found) == text and all(piece.endswith(b"\n") for piece in found)
    assert all(len(piece) <= nvrx_wire.CHUNK_BYTES or piece.count(b"\n") == 1 for piece in found)


def test_our_client_and_our_service(service: tuple[str, Path]) -> None:
    address, root = service
    lines = [(f"{root}/sub/x.log", b"1: a\n" * 100_000), (f"{root}/y.log", b"2: b\n"), (f"{root}/sub/x.log", b"c\n")]
    assert nvrx_client.send(address, lines) == 500_007
    assert (root / "sub/x.log").read_bytes() == b"1: a\n" * 100_000 + b"c\n"
    assert (root / "y.log").read_bytes() == b"2: b\n"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "ROOT/../evil.log", "ROOT/link/evil.log", "ROOT/mine.log", "ROOT"])
def test_paths_outside_the_folder_and_files_of_our_own_are_refused(service: tuple[str, Path], path: str) -> None:
    address, root = service
    (root / "link").symlink_to(root.parent)
    (root / "mine.log").touch()
    (root / "mine.log.idx").touch()
    with pytest.raises(ConnectionError):
        nvrx_client.send(address, [(path.replace("ROOT", str(root)), b"x\n")])
    assert not (root.parent / "evil.log").exists() and (root / "mine.log").read_bytes() == b""


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as probe:  # bound, but nothing listens
        probe.bind(("127.0.0.1", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrx_client, "_HEALTH_S", 0.3)
            with pytest.raises(ConnectionError, match="log server at 127.0.0.1"):
                nvrx_client.send(f"127.0.0.1:{probe.getsockname()[1]}", [("/x", b"y\n")])


def test_our_client_and_the_server_of_the_wheel(foreign: tuple[str, Path]) -> None:
    address, root = foreign
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrx_client, "_HEALTH_S", WAIT_S)  # it takes a second to start
        assert (
            nvrx_client.send(address, [(f"{root}/t_cycle0.log", b"0: a\n"), (f"{root}/t_cycle1.log", b"1: b\n")]) == 10
        )
    with stage(root.parent) as merge:
        merge.until(lambda: (root / "t_cycle1.log").exists() and (root / "t_cycle1.log").read_bytes(), "written")
    assert (root / "t_cycle0.log").read_bytes() == b"0: a\n" and (root / "t_cycle1.log").read_bytes() == b"1: b\n"
    with pytest.raises(ConnectionError, match="outside"):
        nvrx_client.send(address, [("/outside/x.log", b"y\n")])


def test_the_stub_of_the_wheel_and_our_service(service: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's generated code and messages, as its GrpcWriterThread uses them."""
    address, root = service
    monkeypatch.syspath_prepend(str(nvrx_wheel.unpacked() / "nvidia_resiliency_ext/shared_utils/proto"))
    code = (nvrx_wheel.unpacked() / "nvidia_resiliency_ext/shared_utils/proto/log_aggregation_pb2.py").read_text()
    names: dict[str, Any] = {"__name__": "log_aggregation_pb2"}
    exec(compile(code, "log_aggregation_pb2.py", "exec"), names)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{nvrx_wire.SERVICE}/HealthCheck",
            request_serializer=names["HealthRequest"].SerializeToString,
            response_deserializer=names["HealthResponse"].FromString,
        )
        health = call(names["HealthRequest"](), timeout=WAIT_S)
        assert health.healthy and health.connected_clients == 0
        stream = channel.stream_unary(
            f"/{nvrx_wire.SERVICE}/StreamLogs",
            request_serializer=names["LogChunk"].SerializeToString,
            response_deserializer=names["StreamResponse"].FromString,
        )
        chunk = names["LogChunk"](node_id="n_1", data=b" 3: text\n", file_path=f"{root}/z_cycle0.log")
        answer = stream(iter([chunk, chunk]), timeout=WAIT_S)
        assert (answer.status, answer.bytes_received) == ("OK", 18)
        with pytest.raises(grpc.RpcError) as refused:
            stream(iter([names["LogChunk"](data=b"x\n", file_path="/etc/x")]), timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (root / "z_cycle0.log").read_bytes() == b" 3: text\n" * 2
