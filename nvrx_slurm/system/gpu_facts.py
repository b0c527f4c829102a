"""Readings of NVML for the health checks. As in `gpus`: by GPU, without GPUs that do not tell.

See `gpus.by_gpu` for their parameters and errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from nvrx_slurm.system.gpus import Env, Say, by_gpu, known, quiet, read
from nvrx_slurm.system.hardware import HardwareError

# nvml.h, nvmlClocksEventReason*: those that say that the GPU is slower than it should be.
THROTTLE_REASONS = {
    "hw-slowdown": 0x8,
    "sw-thermal": 0x20,
    "hw-thermal": 0x40,
    "hw-power-brake": 0x80,
}
FABRIC_STATES = ("not supported", "not started", "in progress", "completed")


def driver_version(say: Say = quiet) -> str:
    """The version of the driver that NVML talks to: "570.86.15"."""
    say("asking NVML for the driver's version")
    return str(read(lambda nvml: nvml.nvmlSystemGetDriverVersion()))


def with_minors(minors: Iterable[int], say: Say = quiet) -> Env:
    """The `env` of the GPUs with these device files (/dev/nvidia3 is 3), as Slurm numbers them; not all are NVML's."""
    uuids = dict(_minors({}, say=say).values())
    try:
        return {"CUDA_VISIBLE_DEVICES": ",".join(uuids[minor] for minor in minors)}
    except KeyError as missing:
        raise HardwareError(
            f"NVML shows no GPU with the device file /dev/nvidia{missing}"
        ) from None


@by_gpu("device file")
def _minors(nvml: ModuleType, handle: Any) -> tuple[int, str]:
    """Number of a GPU's device file, and UUID."""
    return nvml.nvmlDeviceGetMinorNumber(handle), nvml.nvmlDeviceGetUUID(handle)


class Ecc(NamedTuple):
    """ECC errors since the driver was loaded or the GPU was reset."""

    corrected: int
    uncorrected: int


@by_gpu("ECC errors")
def ecc_errors(nvml: ModuleType, handle: Any) -> Ecc:
    """Volatile ECC errors of a GPU with ECC switched on."""
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    return Ecc(
        *(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC) for kind in kinds)
    )


class Rows(NamedTuple):
    """Row remapping (Ampere and later): a remap waits for a reset; one failed, since no spare row is left."""

    pending: bool
    failed: bool


@by_gpu("remapped rows")
def remapped_rows(nvml: ModuleType, handle: Any) -> Rows:
    """Row remapping of a GPU that has it."""
    *_, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return Rows(bool(pending), bool(failed))


@by_gpu("clock throttle reasons")
def throttle_reasons(nvml: ModuleType, handle: Any) -> tuple[str, ...]:
    """Why a GPU's clocks are held down right now: words of THROTTLE_REASONS."""
    bits = known(nvml, partial(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle))
    if bits is None:  # before r535
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return tuple(name for name, bit in THROTTLE_REASONS.items() if bits & bit)


class Heat(NamedTuple):
    """Degrees Celsius: now, and where the GPU begins to slow down (None: it does not tell)."""

    now_c: int
    limit_c: int | None


@by_gpu("temperature")
def temperatures(nvml: ModuleType, handle: Any) -> Heat:
    """Temperature of a GPU's chip."""
    slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    limit = known(nvml, lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, slowdown))
    return Heat(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), limit or None)


@by_gpu("processes")
def processes(nvml: ModuleType, handle: Any) -> tuple[int, ...]:
    """Pids that compute on a GPU, as the initial pid namespace numbers them."""
    return tuple(sorted({found.pid for found in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}))


@by_gpu("persistence mode")
def persistence(nvml: ModuleType, handle: Any) -> bool:
    """Whether persistence mode is on: without it the driver unloads its state when the GPU is idle."""
    return bool(nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED)


class Fabric(NamedTuple):
    """Registration with the NVLink fabric: a word of FABRIC_STATES, what it ended with (0 = well), and what is degraded
    ("bandwidth", ...)."""

    state: str
    status: int
    degraded: tuple[str, ...]


# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: shift and mask of a field, and its bad values; 0 = not supported.
_FABRIC_HEALTH = {
    "bandwidth": (0, 0x3, {1}),
    "route recovery under way": (2, 0x3, {1}),
    "route unhealthy": (4, 0x3, {1}),
    "access timeout recovery under way": (6, 0x3, {1}),
    "incorrect configuration": (8, 0xF, {*range(2, 16)}),
}


def _fabric_info(nvml: ModuleType, handle: Any) -> Any:
    from ctypes import byref  # loaded by then

    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


@by_gpu("fabric state")
def fabric(nvml: ModuleType, handle: Any) -> Fabric | None:
    """State of a GPU that belongs to an NVSwitch fabric."""
    info = _fabric_info(nvml, handle)
    if info.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    state = FABRIC_STATES[info.state] if info.state < len(FABRIC_STATES) else f"state {info.state}"
    degraded = (
        name
        for name, (at, mask, bad) in _FABRIC_HEALTH.items()
        if info.healthMask >> at & mask in bad
    )
    return Fabric(state, int(info.status), tuple(degraded))


@by_gpu("NVLink domain")
def cluster_uuids(nvml: ModuleType, handle: Any) -> str | None:
    """ClusterUUID of the NVLink domain of a GPU, as hexadecimal digits; None where it is in none."""
    uuid = bytes(_fabric_info(nvml, handle).clusterUuid)
    return uuid.hex() if any(uuid) else None


# Error counters of NVLink, the newest way first: of each link by scope (Hopper and later), and by fields that links
# 0..11 have.
_BY_SCOPE = (
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
)
_BY_FIELD = ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_L", "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L")


@by_gpu("NVLink errors")
def nvlink_errors(nvml: ModuleType, handle: Any) -> dict[int, int] | None:
    """Errors that each NVLink of a GPU counted so far (receive errors, replays, recoveries), by link number.

    Counters begin at 0 when the GPU is reset, and end at their width.
    """
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    active = [
        link for link in links if known(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
    ]
    by_scope = [(link, (getattr(nvml, name, None), link)) for link in active for name in _BY_SCOPE]
    by_field = [
        (link, (getattr(nvml, f"{name}{link}", None), 0)) for link in active for name in _BY_FIELD
    ]
    return _counted(nvml, handle, by_scope) or _counted(nvml, handle, by_field) or None


def _counted(
    nvml: ModuleType, handle: Any, fields: Iterable[tuple[int, tuple[int | None, int]]]
) -> dict[int, int]:
    """Sum of the fields of each link, without fields that this GPU does not know."""
    asked = [(link, field) for link, field in fields if field[0] is not None]
    if not asked:
        return {}
    values = known(
        nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, [field for _, field in asked])
    )
    found: dict[int, int] = {}
    for (link, _), value in zip(asked, values or (), strict=False):
        if value.nvmlReturn == nvml.NVML_SUCCESS:
            found[link] = found.get(link, 0) + int(value.value.ullVal)
    return found
