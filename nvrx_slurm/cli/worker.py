"""How the workers of this node are started: command line, NUMA binding, streams on the console."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from nvrx_slurm.cli.here import Here, Layout, OnNode, working_directory
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.values import Std
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.workers.worker_spec import LOCAL_RANK_MACRO, WarmSpec, WorkerContract, WorkerSpec
from nvrx_slurm.system import numa
from nvrx_slurm.types import RestartPolicy

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def worker_spec(here: Here, shape: Layout, script: str, args: tuple[str, ...], cycle_info: str) -> WorkerSpec:
    """What starts the workers of this node. `cycle_info`: see `worker_spec.WorkerContract`.

    Raises UsageError where NUMA binding was asked for and fails.
    """
    launch, ft = here.launch, here.ft
    argv = worker_argv(launch, script, args)
    return WorkerSpec(
        argv=argv,
        contract=contract(here, shape, cycle_info),
        limits=ft.rank_limits(),
        termination_signal=ft.rank_termination_signal,
        shown=partial(_shown, launch),
        line_prefix="" if launch.console_prefix == "none" else WorkerSpec.line_prefix,
        monitored=not launch.disable_rank_monitors,
        settings=ft.rank_settings(),
        prefixes=_prefixes(here, shape),
        warning_signal=ft.warning_signal or 0,
        in_step=here.slurm is not None,  # Slurm signals the workers of a step, too
        hang_collect_s=ft.hang_collect_s,
        warm=_warm(here, argv, script, shared=shape.on_node.world > shape.nproc),
        wrapped=RestartPolicy(ft.restart_policy) is RestartPolicy.MIN_HEALTHY,
    )


def contract(here: Here, shape: Layout, cycle_info: str = "") -> WorkerContract:
    """What the environment of each worker says."""
    run, local = shape.run_dir, shape.on_node
    return WorkerContract(run.job_id, here.launch.role, str(run.path), cycle_info, local.first, local.world)


def worker_argv(launch: LaunchConfig, script: str, args: tuple[str, ...]) -> list[str]:
    """Command line of one worker. Raises UsageError when the script is not there."""
    if launch.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"the program {script} is not an executable file, nor on PATH; check the name")
        return [script, *args]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if launch.module:
        return [*python, "-m", script, *args]
    _check_script(script)
    return [*python, "-c", _RUN_PATH, script, *args] if launch.run_path else [*python, script, *args]


def _warm(here: Here, argv: list[str], script: str, shared: bool) -> WarmSpec | None:
    """What the workers' template does; None where there is none. `shared`: other agents have workers on this node."""
    launch, ft = here.launch, here.ft
    differs = any(LOCAL_RANK_MACRO in word for word in argv)  # a template has the command line of its workers
    if ft.warm == "off" or launch.no_python or differs or argv[0] != sys.executable:
        return None
    if shared and not ft.preload:  # one template for each agent would take more memory than it saves
        return None
    path0: str | None = os.path.dirname(os.path.realpath(script))
    if launch.module:
        path0 = os.getcwd()
    elif launch.run_path:
        path0 = ""
    if os.environ.get("PYTHONSAFEPATH"):
        path0 = None
    return WarmSpec(None if launch.module else os.path.abspath(script), path0, ft.preload)


def _check_script(script: str) -> None:
    """Refuse it here once; otherwise each rank's Python would report it in each cycle."""
    if not os.path.exists(script):  # False for a path that cannot be looked at, unlike Path.exists
        raise UsageError(f"the training script {script} does not exist (in {working_directory()}); check the path")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the training script {script} is a directory without a __main__.py; give a file")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the training script {script} may not be read by this user; check its permissions")


def numa_bindings(here: Here, nproc: int, local: OnNode) -> tuple[numa.Binding, ...]:
    """The binding of each worker of this agent by --numa-bind or NVRX_GPUS_PER_NUMA; () if binding is off."""
    launch, strict = here.launch, here.ft.numa_bind_strict
    if launch.gpus_per_numa is not None:
        if launch.numa_bind != "off":
            raise UsageError(f"{numa.BY_GPU} and {numa.BY_NUMBER} exclude each other; leave one out")
        prefixes = numa.prefixes(local.position + nproc, launch.gpus_per_numa, strict)[local.position :]
        return tuple(numa.Binding(prefix, numa.BY_NUMBER) for prefix in prefixes)
    if launch.numa_bind == "off":
        return ()
    return numa.by_gpu(local.first + nproc, here.env, strict, Path(launch.sysroot) / "sys")[local.first :]


def _prefixes(here: Here, shape: Layout) -> tuple[tuple[str, ...], ...]:
    prefixes = tuple(binding.prefix for binding in numa_bindings(here, shape.nproc, shape.on_node))
    what = numa.BY_NUMBER if here.launch.gpus_per_numa is not None else numa.BY_GPU
    numa.check(prefixes, what)
    return prefixes


def _shown(launch: LaunchConfig, local_rank: int) -> int:
    """Bits of the streams of a local rank that the console shows (1 stdout, 2 stderr)."""
    only = launch.local_ranks_filter
    if only is not None and local_rank not in only:
        return 0
    hidden = launch.redirects.of(local_rank) & ~launch.tee.of(local_rank)
    return int(Std.ALL & ~hidden)
