"""The attribution service of this job, from its settings."""

from __future__ import annotations

import importlib.util
import os

from nvrx_slurm.attribution.records import AttributionSpec, read_key
from nvrx_slurm.cli.here import Here
from nvrx_slurm.config.attribution import MANAGED
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.output.logs import LogSpec
from nvrx_slurm.node.run_dir import RunDir

_KEY_FILE_ENV = "LLM_API_KEY_FILE"


def attribution_spec(here: Here, run: RunDir, logs: LogSpec | None, hosts: bool) -> AttributionSpec | None:
    """What the coordinator's node needs; None without a service. `hosts`: this node begins as the coordinator.

    Raises UsageError for a key that cannot be used, or a package that is missing.
    """
    ft, slurm, env = here.ft, here.slurm, here.env
    if not ft.attribution_service or logs is None:
        return None
    key_file = ft.attribution_llm_api_key_file or env.get(_KEY_FILE_ENV, "")
    asked = ft.attribution_llm_base_url or ft.attribution_export_url or ft.attribution_service
    if hosts and ft.attribution_llm_base_url:
        _check_key_file(key_file)
    if asked != MANAGED and importlib.util.find_spec("httpx") is None:
        raise UsageError(
            f"attribution with {asked}: the Python package httpx, which speaks to it, is not installed;"
            " pip install 'nvrx_slurm[attribution]'"
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
        raise UsageError(
            f"the key file {path!r} of a language model cannot be used: {why}; correct"
            f" --ft-attribution-llm-api-key-file or {_KEY_FILE_ENV}"
        ) from None
