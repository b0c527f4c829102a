"""NUMA binding of workers with numactl(8): worker i goes to node i // NVRX_GPUS_PER_NUMA or
(`--numa-bind auto`) to the node that its GPU is attached to, on the CPUs that Slurm gave us.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import gpus, pci
from nvrx_slurm.system.hardware import Absent, HardwareError

_TRY_TIMEOUT_S = 10.0
ONLINE = Path("/sys/devices/system/node/online")
BY_NUMBER = "NVRX_GPUS_PER_NUMA"
BY_GPU = "--numa-bind auto"


def prefixes(
    nproc: int, gpus_per_numa: int, strict: bool, online: Path = ONLINE
) -> tuple[tuple[str, ...], ...]:
    """The words before the command of each local rank. `strict`: memory only from that node, else the local one first.

    Raises UsageError without numactl, or for a NUMA node that this machine lacks.
    """
    _require_numactl(BY_NUMBER)
    last = (nproc - 1) // gpus_per_numa
    here = _numbers(online)
    if here is not None and not set(range(last + 1)) <= here:
        raise UsageError(
            f"NVRX_GPUS_PER_NUMA={gpus_per_numa} puts local rank {nproc - 1} on NUMA node {last},"
            f" but this machine has nodes {','.join(map(str, sorted(here)))}; give a larger number"
        )
    nodes = [local_rank // gpus_per_numa for local_rank in range(nproc)]
    return tuple(
        ("numactl", f"--cpunodebind={node}", f"--membind={node}" if strict else "--localalloc")
        for node in nodes
    )


class Binding(NamedTuple):
    """The binding of one worker. `prefix`: words before its command, () if not bound; `text`: the reason."""

    prefix: tuple[str, ...]
    text: str


class Allowed(NamedTuple):
    """What this process may use: CPUs by sched_getaffinity(2), NUMA nodes by Mems_allowed (None: all)."""

    cpus: frozenset[int]
    nodes: frozenset[int] | None

    @classmethod
    def now(cls) -> Allowed:
        """What the kernel allows this process: Slurm's cpuset, a container's, an outer taskset."""
        status = Path("/proc/self/status").read_text().splitlines()
        nodes = next(
            (line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")), ""
        )
        return cls(frozenset(os.sched_getaffinity(0)), pci.ranges(nodes))


def by_gpu(
    nproc: int,
    env: Mapping[str, str],
    strict: bool,
    sys_root: Path = Path("/sys"),
    allowed: Allowed | None = None,
) -> tuple[Binding, ...]:
    """One binding per local rank: the NUMA node of the GPU with that CUDA number, on CPUs that this process may use.

    Never raises for hardware: a worker is not bound where its GPU or NUMA node is not known (the kernel says -1), or
    none of the node's CPUs may be used. `strict` as for `prefixes`, where memory of that node may be used.
    """
    allowed = allowed or Allowed.now()
    try:
        addresses = list(gpus.pci_addresses(env).values())
    except (Absent, HardwareError) as why:
        return (Binding((), f"not bound: {why}"),) * nproc
    found = [_at(address, strict, sys_root, allowed) for address in addresses[:nproc]]
    lacking = Binding((), f"not bound: there are {len(addresses)} GPUs for {nproc} workers")
    return (*found, *[lacking] * (nproc - len(found)))


def _at(address: str, strict: bool, sys_root: Path, allowed: Allowed) -> Binding:
    gpu = f"GPU {address}"
    node = pci.numa_node(sys_root, address)
    if node is None:
        return Binding((), f"not bound: the NUMA node of {gpu} is not known")
    cpus = _numbers(sys_root / f"devices/system/node/node{node}/cpulist")
    if not cpus:
        return Binding((), f"not bound: the CPUs of NUMA node {node} ({gpu}) are not known")
    if not cpus & allowed.cpus:
        return Binding((), f"not bound: none of the CPUs of NUMA node {node} ({gpu}) is allowed")
    whole = cpus <= allowed.cpus
    where = (
        f"--cpunodebind={node}"
        if whole
        else f"--physcpubind={','.join(map(str, sorted(cpus & allowed.cpus)))}"
    )
    local = not strict or (allowed.nodes is not None and node not in allowed.nodes)
    memory = "--localalloc" if local else f"--membind={node}"
    part = "all" if whole else f"{len(cpus & allowed.cpus)} of {len(cpus)}"
    return Binding(("numactl", where, memory), f"NUMA node {node} of {gpu}, {part} of its CPUs")


def _require_numactl(what: str) -> None:
    """Raises UsageError without it; `what` needs it."""
    if shutil.which("numactl") is None:
        raise UsageError(
            f"{what} needs the numactl command, which is not on PATH; install it, or unset it"
        )


def check(found: Iterable[Sequence[str]], what: str = BY_NUMBER) -> None:
    """Try these prefixes, which `what` asked for. Raises UsageError: numactl is missing or refuses (a container without
    set_mempolicy, a cpuset)."""
    for words in dict.fromkeys(tuple(words) for words in found if words):
        _require_numactl(what)
        try:
            done = subprocess.run(
                [*words, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRY_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        else:
            if done.returncode == 0:
                continue
            why = (
                " ".join(done.stderr.decode(errors="replace").split())[:200]
                or f"exit code {done.returncode}"
            )
        raise UsageError(
            f"{what}: {' '.join(words)} fails on this node ({why}); correct that, or unset it"
        )


def _numbers(path: Path) -> frozenset[int] | None:
    """Numbers of a list in a file; None where the kernel tells none (no NUMA, a container without sysfs)."""
    return pci.ranges(pci.text(path) or "")
