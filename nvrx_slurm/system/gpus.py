"""GPUs of this node through NVML (nvidia-ml-py), without CUDA: a launcher must not take a context on a GPU.

Every reading opens NVML, reads and closes it, in a thread with a bound, since a driver in trouble may not answer. A
process that lives only for its readings opens it once (`keep_open`). Raises `hardware.Absent` where there is nothing to
read, `hardware.HardwareError` where a GPU fails. More readings, for the health checks: `gpu_facts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, TypeVar

from nvrx_slurm.system import bounded
from nvrx_slurm.system.hardware import Absent, HardwareError

T = TypeVar("T")
Env = Mapping[str, str]
Say = Callable[[str], object]  # gets a note before each call that may never return

TIMEOUT_S = 10.0
NO_ACTION = "NONE"
LIBRARY = "libnvidia-ml.so.1"
CUDA_LIST = "CUDA_VISIBLE_DEVICES"
# by which a process is told its devices: of NVIDIA, AMD (two) and Intel
LISTS = (CUDA_LIST, "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# NVML says one of these where there is no (usable) driver, and where a GPU or driver does not know what is asked.
_NO_NVML = (
    "LIBRARY_NOT_FOUND",
    "DRIVER_NOT_LOADED",
    "NO_PERMISSION",
    "LIB_RM_VERSION_MISMATCH",
    "FUNCTION_NOT_FOUND",
)
_NOT_KNOWN = (
    "NOT_SUPPORTED",
    "INVALID_ARGUMENT",
    "FUNCTION_NOT_FOUND",
    "NOT_FOUND",
    "NO_DATA",
    "NO_PERMISSION",
)
# Errors of the calling process, or of library and driver; they say nothing about a GPU.
SAYS_NOTHING = frozenset(
    {
        "UNINITIALIZED",
        "ALREADY_INITIALIZED",
        "INSUFFICIENT_SIZE",
        "FUNCTION_NOT_FOUND",
        "NO_PERMISSION",
        "MEMORY",
    }
    | {"INSUFFICIENT_RESOURCES", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED"}
)
_MIB = 1 << 20


class _Process:
    """State of this process: there is no library; NVML is to be kept open; it is open."""

    no_library = keep = is_open = False


class _Coded(Exception):
    """An error with NVML's name of the reason; "" if this nvidia-ml-py does not know it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class NoNvml(_Coded, Absent):
    """NVML cannot be used at all; `code`: as in "DRIVER_NOT_LOADED"."""


class NvmlFailed(_Coded, HardwareError):
    """A call of NVML failed."""


def quiet(text: str) -> None:
    """A `Say` that does nothing."""


def count(env: Env) -> int:
    """How many GPUs a process of this node may use: the entries of CUDA_VISIBLE_DEVICES, else all that NVML sees.

    0 where there is no driver. An empty CUDA_VISIBLE_DEVICES hides all; entries after -1 do not count (CUDA's rule).
    """
    visible = _visible(env)
    try:
        return seen() if visible is None else len(visible)
    except (Absent, HardwareError):
        return 0


def seen() -> int:
    """How many GPUs NVML shows this process: in a cgroup that hides devices only its own."""
    return len(read(_present))


def preload() -> None:
    """Import nvidia-ml-py now where NVML's library is, so that forked processes need not. Elsewhere this process does
    not look for the library again."""
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
        import pynvml  # noqa: F401
    except OSError:
        _Process.no_library = True
    except ImportError:
        return  # `read` says so


def keep_open() -> None:
    """Keep NVML open until the end of this process, which must be near."""
    _Process.keep = True


def by_gpu(
    what: str,
) -> Callable[[Callable[[ModuleType, Any], T | None]], Callable[..., dict[str, T]]]:
    """Make the decorated `read_one(nvml, handle)`, which returns None for "not known", a reading of the chosen GPUs.

    Its parameters: `env` (its CUDA_VISIBLE_DEVICES chooses; {} = all), `device_index` (one of those by CUDA's number,
    the only one there is if just one is shown; None: all), `timeout_s`, `say`. It returns {"GPU 3 (GPU-<uuid>)": value}
    without GPUs that do not tell, and raises Absent where none does.
    """

    def declare(read_one: Callable[[ModuleType, Any], T | None]) -> Callable[..., dict[str, T]]:
        @wraps(read_one)
        def chosen(
            env: Env,
            device_index: int | None = None,
            timeout_s: float = TIMEOUT_S,
            say: Say = quiet,
        ) -> dict[str, T]:
            def read_all(nvml: ModuleType) -> dict[str, T]:
                found: dict[str, T] = {}
                for index in _chosen(nvml, env, device_index):
                    say(f"asking NVML for the {what} of GPU {index}")
                    with _sentence(nvml, f"GPU {index}"):
                        handle = nvml.nvmlDeviceGetHandleByIndex(index)
                        value = known(nvml, partial(read_one, nvml, handle))
                        if value is not None:
                            found[f"GPU {index} ({nvml.nvmlDeviceGetUUID(handle)})"] = value
                return found

            say("opening NVML")
            found = read(read_all, timeout_s)
            if not found:
                raise Absent(f"no GPU of this process tells its {what}")
            return found

        return chosen

    return declare


@by_gpu("recovery action")
def recovery_actions(nvml: ModuleType, handle: Any) -> str | None:
    """What the driver says must be done to a GPU ("NONE", "GPU_RESET", ...); drivers before r570 do not tell."""
    field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
    if field is None:
        return None
    value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    action = value.value.uiVal
    return _names(nvml, "NVML_GPU_RECOVERY_ACTION_").get(action, f"UNKNOWN({action})")


@by_gpu("NVLink")
def nvlinks(nvml: ModuleType, handle: Any) -> dict[int, bool] | None:
    """Whether each NVLink of a GPU is active, by link number; None for a GPU without NVLink."""
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    states = {
        link: known(nvml, partial(nvml.nvmlDeviceGetNvLinkState, handle, link)) for link in links
    }
    told = {link: state for link, state in states.items() if state is not None}
    return {link: bool(state == nvml.NVML_FEATURE_ENABLED) for link, state in told.items()} or None


@by_gpu("PCI address")
def pci_addresses(nvml: ModuleType, handle: Any) -> str:
    """Where a GPU is on the PCI bus, as sysfs writes it: "0000:17:00.0"."""
    info = nvml.nvmlDeviceGetPciInfo(handle)
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


@by_gpu("memory in use")
def memory_used_mb(nvml: ModuleType, handle: Any) -> float:
    """Memory (MiB) that programs hold on a GPU, without what the driver keeps for itself."""
    # drivers before r510 do not tell: what they have counts the driver's own
    return float(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used / _MIB)


def read(fn: Callable[[ModuleType], T], timeout_s: float = TIMEOUT_S) -> T:
    """What `fn(pynvml)` returns, with NVML open. Raises Absent without a driver, HardwareError if it fails."""
    if _Process.no_library:
        raise NoNvml("LIBRARY_NOT_FOUND", f"no NVML here (there is no {LIBRARY})")
    try:
        import pynvml  # slow to load, and only where GPUs are looked at
    except ImportError as error:
        raise Absent(f"nvidia-ml-py cannot be imported ({error})") from None

    try:
        return bounded.call(partial(_read, pynvml, fn), timeout_s, "nvrx NVML")
    except bounded.Overrun:
        raise HardwareError(f"NVML did not answer within {timeout_s:g} s") from None


def _read(nvml: ModuleType, fn: Callable[[ModuleType], T]) -> T:
    try:
        if not _Process.is_open:
            nvml.nvmlInit()
        _Process.is_open = _Process.keep
    except nvml.NVMLError as error:
        code = _code(nvml, error)
        if code in _NO_NVML:
            raise NoNvml(code, f"no NVML here ({error})") from None
        raise NvmlFailed(code, f"NVML cannot be opened: {error}") from None
    try:
        with _sentence(nvml, "NVML"):
            return fn(nvml)
    finally:
        if not _Process.is_open:
            with suppress(nvml.NVMLError):  # what was read is good all the same
                nvml.nvmlShutdown()


@contextmanager
def _sentence(nvml: ModuleType, what: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise NvmlFailed(_code(nvml, error), f"{what}: {error}") from None


def known(nvml: ModuleType, fn: Callable[[], T]) -> T | None:
    """What `fn` reads, None if this GPU or driver does not know it (or hides it)."""
    try:
        return fn()
    except nvml.NVMLError as error:
        if _code(nvml, error) in _NOT_KNOWN:
            return None
        raise


def _code(nvml: ModuleType, error: Any) -> str:
    """Name of an NVMLError's number, without NVML_ERROR_; "" for a number this nvidia-ml-py does not know."""
    return _names(nvml, "NVML_ERROR_").get(error.value, "")


@cache
def _names(nvml: ModuleType, prefix: str) -> dict[int, str]:
    """Names of NVML's constants, without their prefix, by number. Kept, as there are a thousand names to search."""
    return {
        getattr(nvml, name): name.removeprefix(prefix)
        for name in dir(nvml)
        if name.startswith(prefix)
    }


def _chosen(nvml: ModuleType, env: Env, device_index: int | None) -> list[int]:
    """NVML's numbers of the GPUs meant."""
    present = _present(nvml)
    visible = _visible(env)
    shown = present if visible is None else [_number(nvml, entry, present) for entry in visible]
    if not shown:
        raise Absent("this process sees no GPU")
    if device_index is None or len(shown) == 1:
        return shown
    if not 0 <= device_index < len(shown):
        raise Absent(f"this process sees {len(shown)} GPUs, none with number {device_index}")
    return [shown[device_index]]


def _present(nvml: ModuleType) -> list[int]:
    """NVML's numbers of the GPUs that this process may use; it counts those that a cgroup hides, too."""
    found = []
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            if _code(nvml, error) == "NO_PERMISSION":
                continue
        found.append(index)  # also one that is lost: its reading fails
    return found


def _number(nvml: ModuleType, entry: str, present: list[int]) -> int:
    """NVML's number for an entry of CUDA_VISIBLE_DEVICES: a number among those we may use, or a UUID's beginning."""
    if re.fullmatch(r"[0-9]{1,9}", entry):
        if int(entry) < len(present):
            return present[int(entry)]
        raise HardwareError(
            f"CUDA_VISIBLE_DEVICES names GPU {entry}, but NVML shows {len(present)} GPUs"
        )
    if entry.startswith("MIG"):
        raise Absent("a MIG instance, not a whole GPU, is assigned")
    for index in present:
        with _sentence(nvml, f"GPU {index}"):
            if nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)).startswith(entry):
                return index
    raise HardwareError(f"CUDA_VISIBLE_DEVICES names {entry}, which NVML does not see")


def _visible(env: Env, name: str = CUDA_LIST) -> list[str] | None:
    """Entries of CUDA_VISIBLE_DEVICES; None if it is not set."""
    if name not in env:
        return None
    entries = [entry.strip() for entry in env[name].split(",") if entry.strip()]
    return entries[: entries.index("-1")] if "-1" in entries else entries


def listed(env: Env, name: str) -> int | None:
    """How many devices the list `name` has; None if it is not set."""
    entries = _visible(env, name)
    return None if entries is None else len(entries)
