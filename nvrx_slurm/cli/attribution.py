"""The attribution service of this job, from its settings."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping

from nvrx_slurm.agent.attributor import AttributionSpec
from nvrx_slurm.agent.logs import LogSpec
from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.attribution.keys import check_key_file
from nvrx_slurm.attribution.settings import Settings
from nvrx_slurm.config.attribution import MANAGED
from nvrx_slurm.config.layers import Config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.env import SlurmContext

_KEY_FILE_ENV = "LLM_API_KEY_FILE"
_NO_CLIENT = "the Python package httpx, which speaks to it, is not installed; pip install 'nvrx_slurm[attribution]'"


def is_attributed(config: Config) -> bool:
    """Whether there is a service that can be asked."""
    return (config.ft.attribution_endpoint or "grpc:").partition(":")[0] != "grpc"


def attribution_note(config: Config) -> str:
    """Said where settings do nothing; "" else."""
    ft, endpoint = config.ft, config.ft.attribution_endpoint
    if endpoint is None and (ft.attribution_llm_base_url or ft.attribution_export_url):
        return (
            "a language model and an export of attribution have no effect without --ft-attribution-endpoint localhost"
        )
    if endpoint is None or is_attributed(config):
        return ""
    return f"--ft-attribution-endpoint {endpoint} has no effect: services are asked by http, https or unix only"


def attribution_spec(
    config: Config,
    slurm: SlurmContext | None,
    env: Mapping[str, str],
    directory: RunDir,
    logs: LogSpec | None,
    hosts: bool,
) -> AttributionSpec | None:
    """What the coordinator's node needs; None without a service.

    `hosts`: this node begins as the coordinator. It raises UsageError for a key that cannot be used, or a package that
    is missing.
    """
    ft = config.ft
    if not is_attributed(config) or logs is None:
        return None
    key_file = ft.attribution_llm_api_key_file or env.get(_KEY_FILE_ENV, "")
    endpoint = ft.attribution_endpoint or ""
    if hosts and ft.attribution_llm_base_url:
        check_key_file(key_file, "--ft-attribution-llm-api-key-file or LLM_API_KEY_FILE")
    asks = endpoint if endpoint != MANAGED else ft.attribution_llm_base_url or ft.attribution_export_url
    if hosts and asks and importlib.util.find_spec("httpx") is None:
        raise UsageError(f"attribution with {asks}: {_NO_CLIENT}")
    folder, name = os.path.split(logs.prefix)
    root = os.path.realpath(folder)
    settings = Settings(
        endpoint=endpoint,
        root=root,
        tree=str(directory.path),
        own_log=os.path.join(root, f"{os.path.splitext(name)[0]}_attribution.log"),
        log_level=ft.attribution_log_level,
        user=env.get("SLURM_JOB_USER") or env.get("USER", ""),
        job_id=env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_JOB_ID", ""),
        cluster=slurm.cluster_name if slurm is not None else "",
        llm_base_url=ft.attribution_llm_base_url or "",
        llm_model=ft.attribution_llm_model or "",
        llm_key_file=os.path.abspath(key_file) if key_file else "",
        export_url=ft.attribution_export_url or "",
    )
    part = 0 if logs.parts > 1 else -1
    return AttributionSpec(settings, os.path.join(root, name), part, ft.attribution_startup_timeout)
