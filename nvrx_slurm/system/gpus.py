"""GPUs of this node through NVML (nvidia-ml-py), without CUDA: a launcher must not take a context on a GPU."""

from __future__ import annotations

from collections.abc import Mapping


def count(env: Mapping[str, str]) -> int:
    """How many GPUs a process of this node may use: the entries of CUDA_VISIBLE_DEVICES, else all that NVML sees.

    0 where there is no driver. An empty CUDA_VISIBLE_DEVICES hides all; entries after -1 do not count (CUDA's rule).
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
        return entries.index("-1") if "-1" in entries else len(entries)
    return _nvml_count()


def _nvml_count() -> int:
    import pynvml  # slow to load, and only for --nproc-per-node=gpu|auto

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
