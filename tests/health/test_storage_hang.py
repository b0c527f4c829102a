"""Storage that never answers: left alone by default, a failure of the node with --ft-storage-hang-is-failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded import BOUND_S, Node

from nvrx_slurm.config.layers import Config
from nvrx_slurm.node.preflight.head_start import preflight_spec
from nvrx_slurm.node.preflight.preflight import Preflight


def prepared(node: Node, directory: Path, **flags: Any) -> tuple[str, list[str]]:
    """A preflight with these settings: why the node is refused ("": it is not), and what the agent said."""
    config = Config()
    ft = replace(config.ft, gpu_memory_reclaim_timeout=0.0, **flags)
    spec = preflight_spec(replace(config, ft=ft, launch=replace(config.launch, sysroot=str(node.root))))
    spec = replace(spec, arguments=(*spec.arguments, "--deadline=1"))
    said: list[str] = []

    def refuse(error: Exception) -> None:
        raise error

    async def story() -> str:
        preflight = Preflight(spec, 0, directory, said.append, lambda event: None, refuse)
        preflight.checks.spawn()
        try:
            return await asyncio.wait_for(preflight.prepare(0, used=False), BOUND_S)
        finally:
            await preflight.close()

    return asyncio.run(story()), said


ASKS = {
    "mounts": {"enable_dist_storage_healthcheck": True},
    "storage-paths": {"storage_healthcheck_path": "/home,/lustre/fs0"},
}


@pytest.mark.parametrize(("check", "strict"), [("mounts", False), ("mounts", True), ("storage-paths", True)])
def test_a_path_that_hangs_costs_its_node_the_job_only_if_asked_for(
    hung_home: Node, tmp_path: Path, check: str, strict: bool
) -> None:
    why, said = prepared(hung_home, tmp_path, storage_hang_is_failure=strict, **ASKS[check])
    found = [text for text in ([why] if strict else said) if f"{check}" in text and "/home did not answer" in text]
    assert len(found) == 1, (why, said)
    assert (why == "") is not strict


def test_storage_that_answers_is_no_failure(dgx: Node, tmp_path: Path) -> None:
    (dgx / "/home").mkdir(exist_ok=True)
    why, said = prepared(dgx, tmp_path, storage_hang_is_failure=True, **ASKS["mounts"], **ASKS["storage-paths"])
    assert why == "", said
