"""How the workers of this node are started: command line, NUMA binding, streams on the console."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from nvrx_slurm.cli.log_tree import working_directory
from nvrx_slurm.cli.place import OnNode
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.layers import Config
from nvrx_slurm.config.values import Std
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.node.workers.warm import WarmSpec
from nvrx_slurm.node.workers.worker_env import LOCAL_RANK_MACRO, WorkerContract
from nvrx_slurm.node.workers.worker_spec import WorkerSpec
from nvrx_slurm.system import numa
from nvrx_slurm.types import RestartPolicy

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def worker_spec(
    config: Config,
    env: Mapping[str, str],
    nproc: int,
    directory: RunDir,
    script: str,
    args: tuple[str, ...],
    in_step: bool,
    cycle_info: str,
    place: OnNode,
) -> WorkerSpec:
    """What starts the `nproc` workers of this node. `in_step`: Slurm signals the workers of a step, too.
    `cycle_info`: see `worker_env.WorkerContract`; `place`: where they are among all workers of the node.

    Raises UsageError where NUMA binding was asked for and fails.
    """
    argv = worker_argv(config, script, args)
    return WorkerSpec(
        argv=argv,
        contract=WorkerContract(
            directory.job_id, config.launch.role, str(directory.path), cycle_info, place.first, place.world
        ),
        limits=config.ft.rank_limits(),
        termination_signal=config.ft.rank_termination_signal,
        shown=partial(_shown, config.launch),
        line_prefix="" if config.launch.console_prefix == "none" else WorkerSpec.line_prefix,
        monitored=not config.launch.disable_rank_monitors,
        settings=config.ft.rank_settings(),
        prefixes=_prefixes(config, nproc, env, place),
        warning_signal=config.ft.warning_signal or 0,
        in_step=in_step,
        hang_collect_s=config.ft.hang_collect_s,
        warm=_warm(config, argv, script, shared=place.world > nproc),
        wrapped=RestartPolicy(config.ft.restart_policy) is RestartPolicy.MIN_HEALTHY,
    )


def worker_argv(config: Config, script: str, args: tuple[str, ...]) -> list[str]:
    """Command line of one worker. Raises UsageError when the script is not there."""
    launch = config.launch
    if launch.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"the program {script} is not an executable file, nor on PATH; check the name")
        return [script, *args]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if launch.module:
        return [*python, "-m", script, *args]
    _check_script(script)
    return [*python, "-c", _RUN_PATH, script, *args] if launch.run_path else [*python, script, *args]


def _warm(config: Config, argv: list[str], script: str, shared: bool) -> WarmSpec | None:
    """What the workers' template does; None where there is none. `shared`: other agents have workers on this node."""
    launch = config.launch
    differs = any(LOCAL_RANK_MACRO in word for word in argv)  # a template has the command line of its workers
    if config.ft.warm == "off" or launch.no_python or differs or argv[0] != sys.executable:
        return None
    if shared and not config.ft.preload:  # one template for each agent would take more memory than it saves
        return None
    path0: str | None = os.path.dirname(os.path.realpath(script))
    if launch.module:
        path0 = os.getcwd()
    elif launch.run_path:
        path0 = ""
    if os.environ.get("PYTHONSAFEPATH"):
        path0 = None
    return WarmSpec(None if launch.module else os.path.abspath(script), path0, config.ft.preload)


def _check_script(script: str) -> None:
    """Refuse it here once; otherwise each rank's Python would report it in each cycle."""
    if not os.path.exists(script):  # False for a path that cannot be looked at, unlike Path.exists
        raise UsageError(f"the training script {script} does not exist (in {working_directory()}); check the path")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the training script {script} is a directory without a __main__.py; give a file")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the training script {script} may not be read by this user; check its permissions")


def numa_bindings(config: Config, nproc: int, env: Mapping[str, str], place: OnNode) -> tuple[numa.Binding, ...]:
    """The binding of each worker of this agent by --numa-bind or NVRX_GPUS_PER_NUMA; () if binding is off."""
    launch, strict = config.launch, config.ft.numa_bind_strict
    if launch.gpus_per_numa is not None:
        if launch.numa_bind != "off":
            raise UsageError(f"{numa.BY_GPU} and {numa.BY_NUMBER} exclude each other; leave one out")
        prefixes = numa.prefixes(place.position + nproc, launch.gpus_per_numa, strict)[place.position :]
        return tuple(numa.Binding(prefix, numa.BY_NUMBER) for prefix in prefixes)
    if launch.numa_bind == "off":
        return ()
    return numa.by_gpu(place.first + nproc, env, strict, Path(launch.sysroot) / "sys")[place.first :]


def _prefixes(config: Config, nproc: int, env: Mapping[str, str], place: OnNode) -> tuple[tuple[str, ...], ...]:
    prefixes = tuple(binding.prefix for binding in numa_bindings(config, nproc, env, place))
    what = numa.BY_NUMBER if config.launch.gpus_per_numa is not None else numa.BY_GPU
    numa.check(prefixes, what)
    return prefixes


def _shown(launch: LaunchConfig, local_rank: int) -> int:
    """Bits of the streams of a local rank that the console shows (1 stdout, 2 stderr)."""
    only = launch.local_ranks_filter
    if only is not None and local_rank not in only:
        return 0
    hidden = launch.redirects.of(local_rank) & ~launch.tee.of(local_rank)
    return int(Std.ALL & ~hidden)
