"""GPUs and NVLinks by NVML. A reading that NVML refuses is unknown; a GPU that gives no answer fails `gpu-recovery`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import (
    NVML,
    OUTSIDE_PREFLIGHT,
    Check,
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    Verdict,
    check,
    judged,
)
from nvrx_slurm.system import gpu_facts, gpus, pci, trust
from nvrx_slurm.system.gpu_facts import Ecc, Fabric, Heat, Rows
from nvrx_slurm.system.hardware import Absent, HardwareError

_BUDGET_S = 4.0  # a driver without persistence mode takes seconds to open
nvml_check = partial(check, group=NVML, budget_s=_BUDGET_S)

gpus.preload()  # in the process that forks the checks


def visible(node: NodeView) -> gpus.Env:
    """The environment that selects the GPUs to read: all in Slurm's scripts, where CUDA_VISIBLE_DEVICES is the job's,
    else those that this process may use."""
    return {} if in_script(node.env) else node.env


def in_script(env: gpus.Env) -> bool:
    """Whether this is a prolog or epilog of a job, by Slurm's variable, or the few variables that hook.sh passes on."""
    return "SLURM_SCRIPT_CONTEXT" in env or (
        "SLURM_JOB_ID" in env and "SLURM_JOB_NODELIST" not in env
    )


def gpu_check(
    name: str, read: Callable[..., Mapping[str, Any]], reads: str, well: str, **more: Any
) -> Callable[[Callable[[Any, Expected], str]], Check]:
    """Make the decorated `problem(fact, expected)`, which returns "" for a good GPU, a check of each GPU.

    `read(env, say=)` returns the facts by GPU, as "GPU 3 (GPU-<uuid>)". `well`: what is said of good ones.
    """

    def declare(problem: Callable[[Any, Expected], str]) -> Check:
        @wraps(problem)
        def examine(node: NodeView, expected: Expected) -> Judgement:
            facts = read(visible(node), say=node.doing)
            wrong = [
                f"{gpu} {said}" for gpu, fact in facts.items() if (said := problem(fact, expected))
            ]
            return judged(wrong, f"{len(facts)} GPUs {well}")

        return nvml_check(name, reads, **more)(examine)

    return declare


gauge = partial(gpu_check, contexts=OUTSIDE_PREFLIGHT)


# Not a check of a node, but read like one: in a child that can be killed, or given up in a driver that does not answer.
MEMORY = Check(
    "gpu-memory", "NVML: memory in use", "Never.", lambda node, expected: (Verdict.PASS, ""), contexts=(), group=NVML,
    learn=lambda node, expected: gpus.memory_used_mb(node.env, timeout_s=2 * gpus.TIMEOUT_S, say=node.doing),
    budget_s=gpus.TIMEOUT_S,
)  # fmt: skip


# --- how many -------------------------------------------------------------------------------------------------------


def given_gpus(env: gpus.Env) -> int | None:
    """How many GPUs Slurm gave this job on this node; None outside of a job. Raises Absent in a job with parts of GPUs
    (MIG), which Slurm counts and NVML does not."""
    if in_script(env):
        return None
    if any(
        part.strip().startswith("MIG") for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ):
        raise Absent("MIG instances, not whole GPUs, are assigned")
    word = env.get("SLURM_GPUS_ON_NODE", "")
    return int(word) if word.isdecimal() and len(word) < 6 else None


@nvml_check(
    "gpu-count",
    "NVML, GPUs of NVIDIA in /sys/bus/pci/devices, in a job SLURM_GPUS_ON_NODE",
    settings=(SiteKey("gpus", "count", None, "GPUs that NVML must show"),),
    learn=lambda node, expected: {"gpus": gpus.seen()},
)
def gpu_count(node: NodeView, expected: Expected) -> Judgement:
    """NVML shows fewer GPUs than the job was given; outside of jobs not gpus, else not those on the PCI bus."""
    given = given_gpus(node.env)
    of_site = expected["gpus"]
    # a cgroup may hide some from other users
    all_seen = node.is_host() and (trust.as_root() or not node.live)
    on_bus = len(pci.gpus(node.path("/sys"))) if all_seen else None
    wanted = next((count for count in (given, of_site, on_bus) if count is not None), None)
    node.doing("asking NVML for the number of GPUs")
    try:
        shown = gpus.seen()
    except (gpus.NoNvml, HardwareError) as why:
        # A node without a driver has no GPUs, unless some are expected, or the library is there without a driver.
        is_cpu_node = isinstance(why, gpus.NoNvml) and (
            why.code == "LIBRARY_NOT_FOUND" or not on_bus
        )
        # of another vendor, or pretended: what cannot be read is unknown, and not sick
        no_library = isinstance(why, gpus.NoNvml) and why.code == "LIBRARY_NOT_FOUND"
        of_others = no_library and not pci.gpus(node.path("/sys"))
        not_expected = of_others or (is_cpu_node and not given)
        if _says_nothing(why) or (not_expected and not of_site):
            raise
        return Verdict.FAIL, f"{f'{wanted} GPUs' if wanted else 'the GPUs'} cannot be used: {why}"
    if wanted is not None and (
        shown < wanted or (given is None and of_site is not None and shown > wanted)
    ):
        return Verdict.FAIL, f"NVML shows {shown} GPUs instead of {wanted}"
    if not shown:
        raise Absent("there is no GPU")
    return Verdict.PASS, f"{shown} GPUs"


def _says_nothing(failure: Exception) -> bool:
    return isinstance(failure, gpus.NvmlFailed) and failure.code in gpus.SAYS_NOTHING


# --- the driver -----------------------------------------------------------------------------------------------------


@nvml_check("gpu-recovery", "NVML: recovery action of each GPU (driver r570 and later)")
def gpu_recovery(node: NodeView, expected: Expected) -> Judgement:
    """A GPU needs a reset, a drain or a reboot, is lost, or its driver reports an error."""
    try:
        actions = gpus.recovery_actions(visible(node), say=node.doing)
    except HardwareError as failure:
        return Verdict.UNKNOWN if _says_nothing(failure) else Verdict.FAIL, str(failure)
    wrong = [f"{gpu} needs {action}" for gpu, action in actions.items() if action != gpus.NO_ACTION]
    return judged(wrong, f"{len(actions)} GPUs need no recovery action")


_MODULE = re.compile(r"Kernel Module\b.*?\s(\d+\.\d[\d.]*)\s")


@nvml_check(
    "gpu-driver",
    "NVML and /proc/driver/nvidia/version",
    contexts=OUTSIDE_PREFLIGHT,
    settings=(SiteKey("gpu_driver", "text", None, "version of the driver, for example 570.86.15"),),
    learn=lambda node, expected: {"gpu_driver": gpu_facts.driver_version()},
)
def gpu_driver(node: NodeView, expected: Expected) -> Judgement:
    """Library and kernel module have different versions, or not the version of gpu_driver."""
    library = gpu_facts.driver_version(say=node.doing)
    wanted = expected["gpu_driver"]
    try:  # "NVRM version: ... Kernel Module  570.86.15 ..."
        module = _MODULE.search(node.text("/proc/driver/nvidia/version", 4096))
    except FileNotFoundError:
        module = None
    if module and module[1] != library:
        return (
            Verdict.FAIL,
            f"the kernel module is {module[1]}, the library {library}: reboot the node",
        )
    if wanted and library != wanted:
        return Verdict.FAIL, f"the driver is {library} instead of {wanted}"
    return Verdict.PASS, f"the driver is {library}"


@gpu_check(
    "gpu-persistence",
    gpu_facts.persistence,
    "NVML: persistence mode",
    "have persistence mode on",
    contexts=("periodic", "manual"),
    on_fail="warn",
)
def gpu_persistence(on: bool, expected: Expected) -> str:
    """Persistence mode is off."""
    return "" if on else "has persistence mode off"


# --- memory, speed and heat -----------------------------------------------------------------------------------------


@gauge(
    "gpu-ecc",
    gpu_facts.ecc_errors,
    "NVML: volatile ECC errors, corrected and not",
    "have few ECC errors or none",
    settings=(
        SiteKey(
            "gpu_ecc_uncorrected_max", "count", 0, "uncorrected ECC errors that a GPU may have"
        ),
        SiteKey(
            "gpu_ecc_corrected_max", "count", 50_000_000, "corrected ECC errors that a GPU may have"
        ),
    ),
)
def gpu_ecc(found: Ecc, expected: Expected) -> str:
    """A GPU has an uncorrected error, or very many corrected ones, since the driver was loaded."""
    if found.uncorrected > expected["gpu_ecc_uncorrected_max"]:
        return f"has {found.uncorrected} uncorrected ECC errors"
    many = found.corrected > expected["gpu_ecc_corrected_max"]
    return f"has {found.corrected} corrected ECC errors" if many else ""


@gauge(
    "gpu-row-remap",
    gpu_facts.remapped_rows,
    "NVML: remapped rows (Ampere and later)",
    "have no row to remap",
)
def gpu_row_remap(rows: Rows, expected: Expected) -> str:
    """A row could not be remapped, or is to be remapped by a reset."""
    if rows.failed:
        return "could not remap a row: its memory needs repair"
    return "has a row to remap: it needs a reset" if rows.pending else ""


_GRAVE_REASONS = ("hw-slowdown", "hw-thermal", "hw-power-brake")
_REASONS = f"reasons that fail, of {', '.join(gpu_facts.THROTTLE_REASONS)}"


@gauge(
    "gpu-throttle",
    gpu_facts.throttle_reasons,
    "NVML: reasons why clocks are held down",
    "run at the clocks they want",
    settings=(SiteKey("gpu_throttle_reasons", "names", _GRAVE_REASONS, _REASONS),),
)
def gpu_throttle(reasons: tuple[str, ...], expected: Expected) -> str:
    """A GPU is slowed down by heat or by its power supply."""
    grave = [why for why in reasons if why in expected["gpu_throttle_reasons"]]
    return f"is slowed down ({', '.join(grave)})" if grave else ""


@gauge(
    "gpu-temperature",
    gpu_facts.temperatures,
    "NVML: temperature of the chip, and where it slows down",
    "are cool enough",
    settings=(
        SiteKey("gpu_temperature_max", "number", None, "degrees Celsius that a GPU may have"),
    ),
)
def gpu_temperature(heat: Heat, expected: Expected) -> str:
    """A GPU is so hot that it slows down, or hotter than gpu_temperature_max."""
    most = expected["gpu_temperature_max"]
    if most is not None:
        return f"is at {heat.now_c} C, more than {most:g}" if heat.now_c > most else ""
    hot = heat.limit_c is not None and heat.now_c >= heat.limit_c
    return f"is at {heat.now_c} C, where it slows down" if hot else ""


# --- NVLink ---------------------------------------------------------------------------------------------------------

_LINK_ERRORS = "nvlink-errors"


def learn_links(node: NodeView, expected: Expected) -> dict[str, Any]:
    """The links that are up, if all GPUs have as many."""
    counts = {sum(links.values()) for links in gpus.nvlinks(visible(node), say=node.doing).values()}
    return {"nvlinks": counts.pop()} if len(counts) == 1 else {}


@gpu_check(
    "nvlink",
    gpus.nvlinks,
    "NVML: state of each NVLink",
    "have their NVLinks up",
    settings=(SiteKey("nvlinks", "count", None, "NVLinks that each GPU must have up"),),
    learn=learn_links,
)
def nvlink(links: Mapping[int, bool], expected: Expected) -> str:
    """A GPU has fewer NVLinks up than nvlinks; without it: some of its NVLinks are up and some down."""
    wanted, up = expected["nvlinks"], sum(links.values())
    if wanted is not None:
        return f"has {up} NVLinks up instead of {wanted}" if up < wanted else ""
    down = ", ".join(str(link) for link, is_up in links.items() if not is_up)
    # a GPU without a bridge or switch has none up
    return f"has NVLink {down} down" if up and down else ""


@nvml_check(
    _LINK_ERRORS,
    "NVML: receive errors, replays and recoveries of each NVLink, compared with earlier runs",
    contexts=OUTSIDE_PREFLIGHT,
    settings=(
        SiteKey(
            "nvlink_errors_max",
            "count",
            1000,
            "errors that an NVLink may count within nvlink_window_s",
        ),
        SiteKey(
            "nvlink_window_s", "seconds", 3600.0, "how long errors of an NVLink count, in seconds"
        ),
    ),
)
def nvlink_errors(node: NodeView, expected: Expected) -> Judgement:
    """An NVLink counted too many errors within nvlink_window_s."""
    now = {
        f"{gpu.partition(' (')[0]} NVLink {link}": count
        for gpu, links in gpu_facts.nvlink_errors(visible(node), say=node.doing).items()
        for link, count in links.items()
    }
    risen = kept.rises(node, _LINK_ERRORS, now, expected["nvlink_window_s"])
    many = sorted(
        (-count, link) for link, count in risen.items() if count > expected["nvlink_errors_max"]
    )
    return judged(
        [f"{link} counted {-count} errors" for count, link in many],
        f"{sum(risen.values())} errors lately",
    )


@gpu_check(
    "nvlink-fabric",
    gpu_facts.fabric,
    "NVML: registration of each GPU with the NVSwitch fabric, and its health",
    "are registered with the NVLink fabric",
)
def nvlink_fabric(fabric: Fabric, expected: Expected) -> str:
    """A GPU is not registered, or the fabric is degraded for it."""
    if fabric.state != "completed":
        return f"is not registered with the NVLink fabric ({fabric.state}): is the fabric manager running?"
    if fabric.status:
        return f"failed to register with the NVLink fabric (NVML error {fabric.status})"
    return f"has a degraded NVLink fabric ({', '.join(fabric.degraded)})" if fabric.degraded else ""


CHECKS = (
    gpu_count,
    gpu_recovery,
    gpu_ecc,
    gpu_row_remap,
    gpu_throttle,
    gpu_temperature,
    gpu_driver,
    gpu_persistence,
    nvlink,
    nvlink_errors,
    nvlink_fabric,
)
