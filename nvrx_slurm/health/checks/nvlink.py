"""NVLink: links that are down, errors on them, and the fabric that NVSwitches make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, listed
from nvrx_slurm.health.checks import counters
from nvrx_slurm.health.checks.gpu import Facts, each, nvml_check, reading
from nvrx_slurm.system import gpu_facts, gpus
from nvrx_slurm.system.gpu_facts import Fabric

_ERRORS = "nvlink-errors"


def judge_links(facts: Facts[dict[int, bool]], expected: Expected) -> tuple[Verdict, str]:
    """Fails for fewer links than `nvlinks`; without it for a link that is down beside another of that GPU's that is up:
    a GPU without a bridge or switch has none up, and nothing is wrong."""
    wanted = expected["nvlinks"]

    def problem(links: Mapping[int, bool]) -> str:
        up = sum(links.values())
        if wanted is not None:
            return f"has {up} NVLinks up instead of {wanted}" if up < wanted else ""
        down = [link for link, is_up in links.items() if not is_up]
        return f"has NVLink {listed(down)} down" if up and down else ""

    return each(facts, problem, f"have their NVLinks up ({sum(sum(links.values()) for links in facts.values())})")


def learn_links(facts: Facts[dict[int, bool]]) -> dict[str, Any]:
    """The links that are up, if all GPUs have as many."""
    counts = {sum(links.values()) for links in facts.values()}
    return {"nvlinks": counts.pop()} if len(counts) == 1 else {}


def gather_errors(node: NodeView, expected: Expected) -> counters.Look:
    """Errors by link, as "GPU 3 NVLink 17", within the window."""
    found = reading(gpu_facts.nvlink_errors)(node, expected)
    now = {
        f"{gpu.partition(' (')[0]} NVLink {link}": count
        for gpu, links in found.items()
        for link, count in links.items()
    }
    return counters.look(node, _ERRORS, now, expected["nvlink_window_s"])


def judge_errors(look: counters.Look, expected: Expected) -> tuple[Verdict, str]:
    """Fails for a link that counted more than `nvlink_errors_max` errors."""
    many = sorted((-count, link) for link, count in look.risen.items() if count > expected["nvlink_errors_max"])
    if many:
        return Verdict.FAIL, listed(f"{link} counted {-count} errors" for count, link in many)
    if look.silent:
        return Verdict.UNKNOWN, f"{listed(look.silent)} reads all ones: does the GPU answer?"
    return Verdict.PASS, f"{sum(look.risen.values())} errors lately{look.note}"


def judge_fabric(facts: Facts[Fabric], expected: Expected) -> tuple[Verdict, str]:
    """Fails where a GPU is not registered with the fabric, or its part of the fabric is degraded."""

    def problem(fabric: Fabric) -> str:
        if fabric.state != "completed":
            return f"is not registered with the NVLink fabric ({fabric.state}): is the fabric manager running?"
        if fabric.status:
            return f"failed to register with the NVLink fabric (NVML error {fabric.status})"
        return f"has a degraded NVLink fabric ({', '.join(fabric.degraded)})" if fabric.degraded else ""

    return each(facts, problem, "are registered with the NVLink fabric")


CHECKS = (
    nvml_check(
        name="nvlink",
        reads="NVML: state of each NVLink",
        fails="A GPU has fewer NVLinks up than nvlinks; without it: some of its NVLinks are up and some down.",
        gather=reading(gpus.nvlinks),
        judge=judge_links,
        settings=(Setting("nvlinks", "count", None, "NVLinks that each GPU must have up"),),
        learn=learn_links,
    ),
    nvml_check(
        name=_ERRORS,
        reads="NVML: receive errors, replays and recoveries of each NVLink, compared with earlier looks",
        fails="An NVLink counted too many errors within nvlink_window_s.",
        gather=gather_errors,
        judge=judge_errors,
        contexts=("prolog", "epilog", "periodic", "manual"),
        settings=(
            Setting("nvlink_errors_max", "count", 1000, "errors that an NVLink may count within nvlink_window_s"),
            Setting("nvlink_window_s", "seconds", 3600.0, "how long errors of an NVLink count, in seconds"),
        ),
        reuse_s=20.0,
    ),
    nvml_check(
        name="nvlink-fabric",
        reads="NVML: registration of each GPU with the NVSwitch fabric, and its health",
        fails="A GPU is not registered, or the fabric is degraded for it.",
        gather=reading(gpu_facts.fabric),
        judge=judge_fabric,
    ),
)
