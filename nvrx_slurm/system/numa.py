"""NUMA binding of workers with numactl(8), as seed 000 defines it: worker i goes to node i // NVRX_GPUS_PER_NUMA."""

from __future__ import annotations

import shutil
from pathlib import Path

from nvrx_slurm.errors import UsageError

ONLINE = Path("/sys/devices/system/node/online")


def prefix(local_rank: int, gpus_per_numa: int, strict: bool) -> tuple[str, ...]:
    """What to put before the command of one worker. `strict`: memory only from that node, else the local one first."""
    node = local_rank // gpus_per_numa
    memory = f"--membind={node}" if strict else "--localalloc"
    return ("numactl", f"--cpunodebind={node}", memory)


def prefixes(nproc: int, gpus_per_numa: int, strict: bool, online: Path = ONLINE) -> tuple[tuple[str, ...], ...]:
    """One prefix per local rank. Raises UsageError without numactl, or for a NUMA node that this machine lacks."""
    if shutil.which("numactl") is None:
        raise UsageError("NVRX_GPUS_PER_NUMA needs the numactl command, which is not on PATH; install it, or unset it")
    last = (nproc - 1) // gpus_per_numa
    here = _numbers(online)
    if here is not None and not set(range(last + 1)) <= here:
        raise UsageError(
            f"NVRX_GPUS_PER_NUMA={gpus_per_numa} puts local rank {nproc - 1} on NUMA node {last},"
            f" but this machine has nodes {','.join(map(str, sorted(here)))}; give a larger number"
        )
    return tuple(prefix(local_rank, gpus_per_numa, strict) for local_rank in range(nproc))


def _numbers(path: Path) -> set[int] | None:
    """Numbers of a list like "0-1,4"; None where the kernel tells none (no NUMA, a container without sysfs)."""
    try:
        parts = path.read_text().strip().split(",")
        ends = [[int(end) for end in part.split("-")] for part in parts]
    except (OSError, ValueError):
        return None
    return {number for end in ends for number in range(end[0], end[-1] + 1)}
