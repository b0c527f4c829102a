"""`python nvhcd_service.py DIR BEHAVIOUR...`: services of another make for our client, one at DIR/BEHAVIOUR each.

Prints "ready" when all listen. `late` prints "asked", and waits until a process opens the FIFO beside its socket.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import grpc

from nvrx_slurm.health.service import nvhcd_pb2 as pb

WELL = pb.HealthCheckResponse(success=True, output='{"fail_count": 0}')


def answer(behaviour: str, path: str, args: list[str]) -> Any:
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
        "echo": pb.HealthCheckResponse(output=json.dumps({"fail_count": 1, "failed_checks": args})),
    }.get(behaviour, WELL)


def serve(behaviour: str, path: str) -> grpc.Server:
    def run(request: Any, context: Any) -> Any:
        return answer(behaviour, path, list(request.args))

    name = "Other" if behaviour == "another service" else "RunHealthCheck"
    handler = grpc.unary_unary_rpc_method_handler(
        run, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
    )
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
