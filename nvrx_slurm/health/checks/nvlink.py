"""NVLink: links that are down, errors on them, and the fabric of the NVSwitches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, listed
from nvrx_slurm.health.checks.gpu import Facts, each, gauge, nvml_check, reading
from nvrx_slurm.system import gpu_facts, gpus
from nvrx_slurm.system.gpu_facts import Fabric

_ERRORS = "nvlink-errors"


def learn_links(facts: Facts[dict[int, bool]]) -> dict[str, Any]:
    """The links that are up, if all GPUs have as many."""
    counts = {sum(links.values()) for links in facts.values()}
    return {"nvlinks": counts.pop()} if len(counts) == 1 else {}


@nvml_check(
    "nvlink",
    reading(gpus.nvlinks),
    "NVML: state of each NVLink",
    settings=(Setting("nvlinks", "count", None, "NVLinks that each GPU must have up"),),
    learn=learn_links,
)
def nvlink(facts: Facts[dict[int, bool]], expected: Expected) -> tuple[Verdict, str]:
    """A GPU has fewer NVLinks up than nvlinks; without it: some of its NVLinks are up and some down."""
    wanted = expected["nvlinks"]

    def problem(links: Mapping[int, bool]) -> str:
        up = sum(links.values())
        if wanted is not None:
            return f"has {up} NVLinks up instead of {wanted}" if up < wanted else ""
        down = [link for link, is_up in links.items() if not is_up]
        return f"has NVLink {listed(down)} down" if up and down else ""  # a GPU without a bridge or switch has none up

    return each(facts, problem, f"have their NVLinks up ({sum(sum(links.values()) for links in facts.values())})")


def gather_errors(node: NodeView, expected: Expected) -> dict[str, int]:
    """Errors by link, as "GPU 3 NVLink 17", within the window."""
    found = reading(gpu_facts.nvlink_errors)(node, expected)
    now = {
        f"{gpu.partition(' (')[0]} NVLink {link}": count
        for gpu, links in found.items()
        for link, count in links.items()
    }
    return kept.rises(node, _ERRORS, now, expected["nvlink_window_s"])


@gauge(
    _ERRORS,
    gather_errors,
    "NVML: receive errors, replays and recoveries of each NVLink, compared with earlier looks",
    settings=(
        Setting("nvlink_errors_max", "count", 1000, "errors that an NVLink may count within nvlink_window_s"),
        Setting("nvlink_window_s", "seconds", 3600.0, "how long errors of an NVLink count, in seconds"),
    ),
)
def nvlink_errors(risen: Mapping[str, int], expected: Expected) -> tuple[Verdict, str]:
    """An NVLink counted too many errors within nvlink_window_s."""
    many = sorted((-count, link) for link, count in risen.items() if count > expected["nvlink_errors_max"])
    return judged([f"{link} counted {-count} errors" for count, link in many], f"{sum(risen.values())} errors lately")


@nvml_check(
    "nvlink-fabric",
    reading(gpu_facts.fabric),
    "NVML: registration of each GPU with the NVSwitch fabric, and its health",
)
def nvlink_fabric(facts: Facts[Fabric], expected: Expected) -> tuple[Verdict, str]:
    """A GPU is not registered, or the fabric is degraded for it."""

    def problem(fabric: Fabric) -> str:
        if fabric.state != "completed":
            return f"is not registered with the NVLink fabric ({fabric.state}): is the fabric manager running?"
        if fabric.status:
            return f"failed to register with the NVLink fabric (NVML error {fabric.status})"
        return f"has a degraded NVLink fabric ({', '.join(fabric.degraded)})" if fabric.degraded else ""

    return each(facts, problem, "are registered with the NVLink fabric")


CHECKS = (nvlink, nvlink_errors, nvlink_fabric)
