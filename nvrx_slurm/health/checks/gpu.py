"""GPUs by NVML. A reading that NVML refuses is unknown; a GPU that fails to answer fails in `gpu-recovery`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

from nvrx_slurm.health.check import NVML, OUTSIDE_PREFLIGHT, Check, Expected, NodeView, Setting, Verdict, check, judged
from nvrx_slurm.system import gpu_facts, gpus, pci
from nvrx_slurm.system.gpu_facts import Ecc, Heat, Rows
from nvrx_slurm.system.hardware import Absent, HardwareError

T = TypeVar("T")
Facts = Mapping[str, T]  # by GPU, as "GPU 3 (GPU-<uuid>)"

# A driver without persistence mode takes seconds to open.
nvml_check = partial(check, group=NVML, budget_s=4.0)
gauge = partial(nvml_check, contexts=OUTSIDE_PREFLIGHT)

_KNOWN = "/proc/driver/nvidia/gpus"  # a container has the directories of its own GPUs only
_MINOR = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)

gpus.preload()  # in the process that forks the checks


def visible(node: NodeView) -> Mapping[str, str]:
    """The environment that selects the GPUs to read: all in Slurm's scripts, where CUDA_VISIBLE_DEVICES is the job's,
    else those that this process may use."""
    return {} if in_script(node.env) else node.env


def in_script(env: Mapping[str, str]) -> bool:
    """Whether this is a prolog or epilog of a job, by Slurm's variable, or the few variables that hook.sh passes on."""
    return "SLURM_SCRIPT_CONTEXT" in env or ("SLURM_JOB_ID" in env and "SLURM_JOB_NODELIST" not in env)


def reading(read: Callable[..., Facts[T]]) -> Callable[[NodeView, Expected], Facts[T]]:
    """A `gather` of the result of `read(env, say=)`."""
    return lambda node, expected: read(visible(node), say=node.doing)


def each(facts: Facts[T], problem: Callable[[T], str], well: str) -> tuple[Verdict, str]:
    """Fails for every GPU with a problem ("" = none)."""
    wrong = [f"{gpu} {said}" for gpu, fact in facts.items() if (said := problem(fact))]
    return judged(wrong, f"{len(facts)} GPUs {well}")


# Not a check of a node, but read like one: in a child that can be killed, or given up in a driver that does not answer.
MEMORY = Check(
    name="gpu-memory",
    reads="NVML: memory in use",
    fails="Never.",
    gather=lambda node, expected: gpus.memory_used_mb(node.env, timeout_s=2 * gpus.TIMEOUT_S, say=node.doing),
    judge=lambda used_mb, expected: (Verdict.PASS, ""),
    contexts=(),
    budget_s=gpus.TIMEOUT_S,
    learn=dict,
    group=NVML,
)


# --- how many -------------------------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """`shown` by NVML (None: it cannot be used, `why`); `on_bus`: on the PCI bus and meant for this container (None:
    not known); `given` to this job by Slurm (None: no job)."""

    shown: int | None
    on_bus: int | None
    given: int | None
    why: str = ""


def gather_count(node: NodeView, expected: Expected) -> Counts:
    """Raises Absent where there is no driver, unless some GPUs are expected, or the library is there without a driver;
    and in a job with parts of GPUs (MIG), which Slurm counts and NVML does not."""
    in_job = not in_script(node.env)
    if in_job and any(part.strip().startswith("MIG") for part in node.env.get("CUDA_VISIBLE_DEVICES", "").split(",")):
        raise Absent("MIG instances, not whole GPUs, are assigned")
    on_bus = None
    if os.geteuid() == 0 or not node.live:  # a cgroup may hide some of them from other users
        known = node.names(_KNOWN)
        on_bus = sum(not _hidden(node, address, known) for address in pci.gpus(node.path("/sys")))
    word = node.env.get("SLURM_GPUS_ON_NODE", "") if in_job else ""
    given = int(word) if word.isdecimal() and len(word) < 6 else None
    node.doing("asking NVML for the number of GPUs")
    try:
        return Counts(gpus.seen(), on_bus, given)
    except gpus.NoNvml as why:
        if not expected["gpus"] and not given and (why.code == "LIBRARY_NOT_FOUND" or not on_bus):
            raise
        return Counts(None, on_bus, given, str(why))
    except HardwareError as failure:
        if isinstance(failure, gpus.NvmlFailed) and failure.code in gpus.SAYS_NOTHING:
            raise  # unknown
        return Counts(None, on_bus, given, str(failure))


def _hidden(node: NodeView, address: str, known: list[str]) -> bool:
    """Whether the driver has this GPU, but the container has no device file or directory of it.

    A GPU that the driver gave up has no directory either, but is not bound to the driver.
    """
    if known and address not in known:
        return os.path.basename(os.path.realpath(node.path(f"/sys/bus/pci/devices/{address}/driver"))) == "nvidia"
    try:
        told = _MINOR.search(node.text(f"{_KNOWN}/{address}/information", 4096))
    except OSError:
        return False
    return told is not None and not os.path.exists(node.path(f"/dev/nvidia{told[1]}"))


@nvml_check(
    "gpu-count",
    gather_count,
    "NVML, GPUs of NVIDIA in /sys/bus/pci/devices, in a job SLURM_GPUS_ON_NODE",
    settings=(Setting("gpus", "count", None, "GPUs that NVML must show"),),
    learn=lambda counts: {"gpus": counts.shown} if counts.shown else {},
)
def gpu_count(counts: Counts, expected: Expected) -> tuple[Verdict, str]:
    """NVML shows fewer GPUs than the job was given; outside of jobs not gpus, else not those on the PCI bus."""
    exact = counts.given is None and expected["gpus"] is not None
    wanted = next((n for n in (counts.given, expected["gpus"], counts.on_bus) if n is not None), None)
    if counts.shown is None:
        return Verdict.FAIL, f"{f'{wanted} GPUs' if wanted else 'the GPUs'} cannot be used: {counts.why}"
    if wanted is not None and (counts.shown < wanted or (exact and counts.shown > wanted)):
        return Verdict.FAIL, f"NVML shows {counts.shown} GPUs instead of {wanted}"
    if not counts.shown:
        raise Absent("there is no GPU")
    return Verdict.PASS, f"{counts.shown} GPUs"


# --- the driver's own advice ----------------------------------------------------------------------------------------


def gather_recovery(node: NodeView, expected: Expected) -> Facts[str] | HardwareError:
    """The recovery action of each GPU, or the error."""
    try:
        return gpus.recovery_actions(visible(node), say=node.doing)
    except HardwareError as failure:
        return failure


@nvml_check("gpu-recovery", gather_recovery, "NVML: recovery action of each GPU (driver r570 and later)")
def gpu_recovery(facts: Facts[str] | HardwareError, expected: Expected) -> tuple[Verdict, str]:
    """A GPU needs a reset, a drain or a reboot, is lost, or its driver reports an error."""
    if isinstance(facts, HardwareError):
        says_nothing = isinstance(facts, gpus.NvmlFailed) and facts.code in gpus.SAYS_NOTHING
        return Verdict.UNKNOWN if says_nothing else Verdict.FAIL, str(facts)
    return each(facts, lambda action: "" if action == gpus.NO_ACTION else f"needs {action}", "need no recovery action")


# --- memory ---------------------------------------------------------------------------------------------------------


@gauge(
    "gpu-ecc",
    reading(gpu_facts.ecc_errors),
    "NVML: volatile ECC errors, corrected and not",
    settings=(
        Setting("gpu_ecc_uncorrected_max", "count", 0, "uncorrected ECC errors that a GPU may have"),
        Setting("gpu_ecc_corrected_max", "count", 50_000_000, "corrected ECC errors that a GPU may have"),
    ),
)
def gpu_ecc(facts: Facts[Ecc], expected: Expected) -> tuple[Verdict, str]:
    """A GPU has an uncorrected error, or very many corrected ones, since the driver was loaded."""

    def problem(found: Ecc) -> str:
        many = [
            f"{count} {kind}"
            for kind, count in (("uncorrected", found.uncorrected), ("corrected", found.corrected))
            if count > expected[f"gpu_ecc_{kind}_max"]
        ]
        return f"has {' and '.join(many)} ECC errors" if many else ""

    return each(facts, problem, "have few ECC errors or none")


@gauge(
    "gpu-row-remap",
    reading(gpu_facts.remapped_rows),
    "NVML: remapped rows (Ampere and later)",
)
def gpu_row_remap(facts: Facts[Rows], expected: Expected) -> tuple[Verdict, str]:
    """A row could not be remapped, or is to be remapped by a reset."""

    def problem(rows: Rows) -> str:
        if rows.failed:
            return "could not remap a row: its memory needs repair"
        return "has a row to remap: it needs a reset" if rows.pending else ""

    return each(facts, problem, f"have no row to remap ({sum(rows.remapped for rows in facts.values())} are)")


# --- speed and heat -------------------------------------------------------------------------------------------------

_GRAVE_REASONS = ("hw-slowdown", "hw-thermal", "hw-power-brake")
_REASONS = f"reasons that fail, of {', '.join(gpu_facts.THROTTLE_REASONS)}"


@gauge(
    "gpu-throttle",
    reading(gpu_facts.throttle_reasons),
    "NVML: reasons why clocks are held down",
    settings=(Setting("gpu_throttle_reasons", "names", _GRAVE_REASONS, _REASONS),),
)
def gpu_throttle(facts: Facts[tuple[str, ...]], expected: Expected) -> tuple[Verdict, str]:
    """A GPU is slowed down by heat or by its power supply."""

    def problem(reasons: tuple[str, ...]) -> str:
        grave = [why for why in reasons if why in expected["gpu_throttle_reasons"]]
        return f"is slowed down ({', '.join(grave)})" if grave else ""

    return each(facts, problem, "run at the clocks they want")


@gauge(
    "gpu-temperature",
    reading(gpu_facts.temperatures),
    "NVML: temperature of the chip, and where it slows down",
    settings=(Setting("gpu_temperature_max", "number", None, "degrees Celsius that a GPU may have"),),
)
def gpu_temperature(facts: Facts[Heat], expected: Expected) -> tuple[Verdict, str]:
    """A GPU is so hot that it slows down, or hotter than gpu_temperature_max."""
    most = expected["gpu_temperature_max"]

    def problem(heat: Heat) -> str:
        if most is not None:
            return f"is at {heat.now_c} C, more than {most:g}" if heat.now_c > most else ""
        hot = heat.limit_c is not None and heat.now_c >= heat.limit_c
        return f"is at {heat.now_c} C, where it slows down" if hot else ""

    return each(facts, problem, f"are at most at {max(heat.now_c for heat in facts.values())} C")


# --- driver ---------------------------------------------------------------------------------------------------------


_MODULE = re.compile(r"Kernel Module\b.*?\s(\d+\.\d[\d.]*)\s")


def gather_driver(node: NodeView, expected: Expected) -> tuple[str, str]:
    """Versions of NVML's library, and of the loaded kernel module ("" if it is not told) by
    /proc/driver/nvidia/version ("NVRM version: ... Kernel Module  570.86.15 ...")."""
    try:
        loaded = _MODULE.search(node.text("/proc/driver/nvidia/version", 4096))
    except FileNotFoundError:
        loaded = None
    return gpu_facts.driver_version(say=node.doing), loaded[1] if loaded else ""


@gauge(
    "gpu-driver",
    gather_driver,
    "NVML and /proc/driver/nvidia/version",
    settings=(Setting("gpu_driver", "text", None, "version of the driver, for example 570.86.15"),),
    learn=lambda versions: {"gpu_driver": versions[0]},
)
def gpu_driver(versions: tuple[str, str], expected: Expected) -> tuple[Verdict, str]:
    """Library and kernel module have different versions, or not the version of gpu_driver."""
    (library, module), wanted = versions, expected["gpu_driver"]
    differ = module not in ("", library)
    wrong = [f"the kernel module is {module}, the library {library}: reboot the node"] if differ else []
    wrong += [f"the driver is {library} instead of {wanted}"] if wanted and library != wanted else []
    return judged(wrong, f"the driver is {library}")


@nvml_check(
    "gpu-persistence",
    reading(gpu_facts.persistence),
    "NVML: persistence mode",
    contexts=("periodic", "manual"),
    on_fail="warn",
)
def gpu_persistence(facts: Facts[bool], expected: Expected) -> tuple[Verdict, str]:
    """Persistence mode is off."""
    return each(facts, lambda on: "" if on else "has persistence mode off", "have persistence mode on")


CHECKS = (
    gpu_count,
    gpu_recovery,
    gpu_ecc,
    gpu_row_remap,
    gpu_throttle,
    gpu_temperature,
    gpu_driver,
    gpu_persistence,
)
