"""`python nvhcd_service.py DIR BEHAVIOUR...`: services of another make for our client, one at DIR/BEHAVIOUR each.

Prints "ready" when all listen. `late` prints "asked", and waits until a process opens the FIFO beside its socket.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import grpc

from nvrx_slurm.health.service import nvhcd_pb2 as pb

WELL = pb.HealthCheckResponse(success=True, output='{"fail_count": 0}')


def answer(behaviour: str, path: str, args: list[str]) -> Any:
    """A response, or bytes to send instead."""
    if behaviour == "dies":
        os._exit(7)
    if behaviour == "late":
        print("asked", flush=True)
        with open(f"{path}.go"):  # until the test opens it, too
            return WELL
    return {
        "sick": pb.HealthCheckResponse(
            success=False,
            exit_code=1,
            output='{"fail_count": 2, "failed_checks": ["hw_drv_gpu_count", "ib_ber"]}',
            error="2 of 102 checks failed",
        ),
        "only success is false": pb.HealthCheckResponse(success=False, output='{"fail_count": 0}'),
        "junk": pb.HealthCheckResponse(success=True, output="all is well"),
        "no fail_count": pb.HealthCheckResponse(success=True, output='{"failed_checks": []}'),
        "empty": pb.HealthCheckResponse(),
        "echo": pb.HealthCheckResponse(output=json.dumps({"fail_count": 1, "failed_checks": args})),
        "huge": pb.HealthCheckResponse(success=True, output='{"fail_count": 0}' + " " * (16 << 20)),
        "not UTF-8": b"\x08\x01\x1a\x02\xff\xff",
        "no message": b"\xff\xff\xff",
    }.get(behaviour, WELL)


def serve(behaviour: str, path: str) -> grpc.Server:
    def run(request: Any, context: Any) -> Any:
        if behaviour == "raises":
            raise RuntimeError("of its own")
        return answer(behaviour, path, list(request.args))

    def to_bytes(response: Any) -> bytes:
        return response if isinstance(response, bytes) else response.SerializeToString()

    name = "Other" if behaviour == "another service" else "RunHealthCheck"
    handler = grpc.unary_unary_rpc_method_handler(run, pb.HealthCheckRequest.FromString, to_bytes)
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = grpc.method_handlers_generic_handler("nvhcd.HealthCheckService", {name: handler})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"unix:{quote(path)}")
    server.start()
    return server


def main(folder: str, *behaviours: str) -> None:
    servers = [serve(behaviour, f"{folder}/{behaviour}") for behaviour in behaviours]
    print("ready", flush=True)
    servers[0].wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
