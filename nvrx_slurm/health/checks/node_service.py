"""The node health check service as a check: one bounded call to an nvhcd-compatible daemon.

Only an answer of the service is a failure; no socket, no answer and any error of the call are unknown.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from typing import Any

from nvrx_slurm.errors import NEEDS_GRPC
from nvrx_slurm.health.check import Expected, Judgement, NodeView, SiteKey, Verdict, check, listed
from nvrx_slurm.system import trust

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
ARGS = ("--no-slurm",)
TIMEOUT_S = 60.0
_MARGIN_S = 0.25  # to report a missing answer before this check's own time is up
_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
)
_SHOWN = 80  # characters of what is wrong


def preload() -> None:
    """Import the modules of the call before the checks are forked. Makes no channel: gRPC's threads do not survive a
    fork. What cannot be imported is said by the check."""
    with contextlib.suppress(ImportError):
        import urllib.parse  # noqa: F401

        import grpc  # noqa: F401

        from nvrx_slurm.health.service import nvhcd_pb2  # noqa: F401


def _call(path: str, timeout_s: float) -> Any:
    """The HealthCheckResponse to one call, over a channel of its own, to the socket at `path`.

    Raises ValueError if the call fails, for any cause.
    """
    from urllib.parse import quote

    try:
        import grpc
    except ModuleNotFoundError:
        raise ValueError(NEEDS_GRPC) from None

    from nvrx_slurm.health.service import nvhcd_pb2 as pb

    with grpc.insecure_channel(f"unix:{quote(path)}", options=_OPTIONS) as channel:
        run = channel.unary_unary(
            METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )
        try:
            return run(pb.HealthCheckRequest(args=ARGS), timeout=timeout_s)
        except grpc.RpcError as error:  # it is a grpc.Call, too
            kind = error.code().name.lower().replace("_", " ")
            # gRPC's own sentences name the address several times
            why = str(error.details()).rpartition(" error: ")[2]
            raise ValueError(f"no answer from {path}: {kind}: {why}") from None


def parse_output(text: str) -> dict[str, Any] | None:
    """The JSON object in `text` if its fail_count is a number (a float here); None for anything else."""
    try:
        # whatever its length: a number of a million digits is infinite
        found = json.loads(text, parse_int=float)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("fail_count"), float) else None


@check(
    "node-service",
    "the answer of the nvhcd-compatible daemon at node_service",
    contexts=("preflight", "manual"),
    settings=(
        SiteKey(
            "node_service", "unix-socket", None, "socket of the service: a path or unix:///path"
        ),
    ),
    only_if="node_service",
    budget_s=TIMEOUT_S + 1,
)
def node_service(node: NodeView, expected: Expected) -> Judgement:
    """The service says that the node is not healthy, or its output is not JSON with a fail_count."""
    path = expected["node_service"]
    place = node.path(path)
    node.doing(f"waiting for {path}")
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        raise ValueError(
            f"there is no {path}: its daemon does not run, or it is not mounted in here"
        ) from None
    if not stat.S_ISSOCK(mode):
        raise ValueError(f"{path} is no socket")
    if trust.as_root():  # a user's agent may believe the user's service; root believes no user
        place = trust.require(place, ValueError)
    left_s = node.deadline_s - _MARGIN_S - time.monotonic()
    reply = _call(place, max(0.0, min(TIMEOUT_S, left_s)))
    return judge(reply.success, reply.output, reply.error)


def judge(success: bool, output: str, error: str) -> Judgement:
    """What the fields of a HealthCheckResponse mean."""
    found = parse_output(output)
    said = f": {error}" if error.strip() else ""
    if found is None:
        return (
            Verdict.FAIL,
            f"its output is no JSON with a number fail_count, but {output[:_SHOWN]!r}{said}",
        )
    if found["fail_count"] != 0:
        failed = found.get("failed_checks") or []
        names = listed(
            str(name)[:_SHOWN] for name in (failed if isinstance(failed, list) else [failed])
        )
        return (
            Verdict.FAIL,
            f"fail_count is {found['fail_count']:g}{f' ({names})' if names else ''}{said}",
        )
    return (
        (Verdict.PASS, "the service found nothing wrong")
        if success
        else (Verdict.FAIL, f"success is false{said}")
    )


CHECKS = (node_service,)
