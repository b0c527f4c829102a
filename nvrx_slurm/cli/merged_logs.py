"""The merged logs of this job, from flags and Slurm."""

from __future__ import annotations

import os

from nvrx_slurm.cli.here import Here, Layout, working_directory
from nvrx_slurm.core.logs.cycle_info import CycleFiles
from nvrx_slurm.core.logs.names import JobName, expand
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.output.logs import LogSpec

_NODES_EACH = 1_000  # of one aggregator
_BATCHES_PER_S = 2_000  # of all nodes together


def _job_name(here: Here, shape: Layout) -> JobName:
    """What the placeholders in paths stand for."""
    slurm = here.slurm
    if slurm is None:
        return JobName(shape.run_dir.job_id)
    array, _, task = slurm.job_name_id.partition("_")
    return JobName(str(slurm.job_id), array, task, slurm.restart_count)


def log_spec(here: Here, shape: Layout) -> LogSpec | None:
    """None: no merged logs are wanted."""
    ft, nodes, name = here.ft, shape.nodes, _job_name(here, shape)
    if ft.per_cycle_applog_prefix is None:
        return None
    return LogSpec(
        prefix=expand(ft.per_cycle_applog_prefix, name),
        logfile=expand(ft.nvrx_logfile, name) if ft.nvrx_logfile is not None else "",
        port=ft.log_server_port,
        parts=ft.log_aggregator_count or -(-nodes.max // _NODES_EACH) if nodes.max > 1 else 1,
        grpc_port=ft.log_server_grpc_port,
        drain_s=ft.log_server_graceful_shutdown_timeout,
        batch_s=max(0.5, nodes.max / _BATCHES_PER_S),
    )


def cycle_files(here: Here, shape: Layout, logs: LogSpec | None) -> CycleFiles | None:
    """None: none are wanted. Of a merged log with several files the first one is named."""
    folder, spec = here.ft.cycle_info_dir, here.ft.per_cycle_applog_prefix
    if folder is None:
        return None
    name = _job_name(here, shape)
    prefix = "" if spec is None else expand(spec, name)
    part = 0 if logs is not None and logs.parts > 1 else -1
    return CycleFiles(os.path.join(working_directory(), folder), name.job, name.restart, prefix, part)


def check_writable(spec: LogSpec) -> None:
    """Raises UsageError where the merged files cannot be made."""
    for path, flag in ((spec.prefix, "--ft-per-cycle-applog-prefix"), (spec.logfile, "--ft-nvrx-logfile")):
        folder = os.path.dirname(path)
        try:
            if path:
                os.makedirs(folder, exist_ok=True)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(13, os.strerror(13))
                if os.path.isdir(path):
                    raise IsADirectoryError(21, os.strerror(21))
        except OSError as error:
            raise UsageError(f"{flag} {path}: {error.strerror}; give a path where this user may write") from None
