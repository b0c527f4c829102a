"""The merged logs of this job and the attribution service that reads them, from flags and Slurm."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from nvrx_slurm.attribution.records import AttributionSpec, read_key
from nvrx_slurm.cli.here import Here, Layout, working_directory
from nvrx_slurm.config.ft_logs import MANAGED
from nvrx_slurm.core.logs.cycle_info import CycleFiles
from nvrx_slurm.core.logs.names import JobName, cycle_file, expand, index_file, tells_jobs_apart
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.output.logs import LogSpec
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.system.owned import make

_BATCHES_PER_S = 2_000  # of all nodes together
_KEY_FILE_ENV = "LLM_API_KEY_FILE"


def _job_name(here: Here, shape: Layout) -> JobName:
    """What the placeholders in paths stand for."""
    slurm = here.slurm
    if slurm is None:
        return JobName(shape.run_dir.job_id)
    array, _, task = slurm.job_name_id.partition("_")
    return JobName(str(slurm.job_id), array, task, slurm.restart_count)


def log_spec(here: Here, shape: Layout) -> LogSpec | None:
    """None: no merged logs are wanted."""
    ft = here.ft
    nodes = shape.nodes
    name = _job_name(here, shape)
    if ft.per_cycle_applog_prefix is None:
        return None
    return LogSpec(
        prefix=expand(ft.per_cycle_applog_prefix, name),
        logfile=expand(ft.nvrx_logfile, name) if ft.nvrx_logfile is not None else "",
        port=ft.log_server_port,
        grpc_port=ft.log_server_grpc_port,
        drain_s=ft.log_server_graceful_shutdown_timeout,
        batch_s=max(0.5, nodes.max / _BATCHES_PER_S),
    )


def cycle_files(here: Here, shape: Layout, logs: LogSpec | None) -> CycleFiles | None:
    """None: none are wanted."""
    folder = here.ft.cycle_info_dir
    name = _job_name(here, shape)
    if folder is None:
        return None
    prefix = "" if logs is None else logs.prefix
    return CycleFiles(os.path.join(working_directory(), folder), name.job, name.restart, prefix)


def check_writable(spec: LogSpec) -> None:
    """Raises UsageError where the merged files cannot be made."""
    for path, flag in (
        (spec.prefix, "--ft-per-cycle-applog-prefix"),
        (spec.logfile, "--ft-nvrx-logfile"),
    ):
        if not path:
            continue
        folder = os.path.dirname(path)
        why = ""
        try:
            make(Path(folder), 0)
        except OSError as error:
            why = f": {error.strerror}"
        if why or not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(path):
            raise UsageError(
                f"{flag} {path} cannot be written{why}; give the path of a file where this user may write"
            )


def log_note(here: Here, spec: LogSpec) -> str:
    """A file of an earlier job is about to be appended to."""
    first = cycle_file(spec.prefix, 0)
    if tells_jobs_apart(here.ft.per_cycle_applog_prefix or "%j") or not os.path.exists(
        index_file(first)
    ):
        return ""
    return f"{first} is there already, and this job appends to it; %j in --ft-per-cycle-applog-prefix keeps jobs apart"


def attribution_spec(
    here: Here, run: RunDir, logs: LogSpec | None, hosts: bool
) -> AttributionSpec | None:
    """What the coordinator's node needs; None without a service. `hosts`: this node begins as the coordinator.

    Raises UsageError for a key that cannot be used, or a package that is missing.
    """
    ft = here.ft
    slurm = here.slurm
    env = here.env
    if not ft.attribution_service or logs is None:
        return None
    key_file = ft.attribution_llm_api_key_file or env.get(_KEY_FILE_ENV, "")
    asked = ft.attribution_llm_base_url or ft.attribution_export_url or ft.attribution_service
    if hosts and ft.attribution_llm_base_url:
        _check_key_file(key_file)
    if asked != MANAGED and importlib.util.find_spec("httpx") is None:
        raise UsageError(
            f"attribution with {asked}: httpx is not here; pip install 'nvrx_slurm[attribution]'"
        )
    folder, name = os.path.split(logs.prefix)
    return AttributionSpec(
        endpoint="" if ft.attribution_service == MANAGED else ft.attribution_service,
        prefix=os.path.join(os.path.realpath(folder), name),
        tree=str(run.path),
        startup_s=ft.attribution_startup_timeout,
        log_level=ft.attribution_log_level,
        user=env.get("SLURM_JOB_USER") or env.get("USER", ""),
        job_id=env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", ""),
        cluster=slurm.cluster_name if slurm is not None else "",
        llm_base_url=ft.attribution_llm_base_url or "",
        llm_model=ft.attribution_llm_model or "",
        llm_key_file=os.path.abspath(key_file) if key_file else "",
        export_url=ft.attribution_export_url or "",
    )


def _check_key_file(path: str) -> None:
    try:
        read_key(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        flag = "--ft-attribution-llm-api-key-file"
        raise UsageError(
            f"the key file {path!r} cannot be used: {why}; correct {flag} or {_KEY_FILE_ENV}"
        ) from None
