"""The environment of a worker: torchrun's contract, plus ours. Pure: `--dry-run` prints the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.types import Node, Plan

# Variables that differ from rank to rank, or from cycle to cycle.
RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("NVRX_TERM", "NVRX_CYCLE", "NVRX_INFRA_RANK", "NVRX_RUN_DIR", "NVRX_CURRENT_CYCLE_INFO", "NVRX_BOARD"),
    "FT_RANK_MONITOR_IPC_SOCKET",
)
LOCAL_RANK_MACRO = "${local_rank}"  # in a script's arguments; torchrun replaces it, too


@dataclass(frozen=True, slots=True)
class WorkerContract:
    """What does not change from cycle to cycle."""

    run_id: str
    role: str
    run_dir: str
    cycle_info: str = ""  # the link to the file of --ft-cycle-info-dir; "" = there is none
    first_local: int = 0  # LOCAL_RANK of the first worker, where several agents share a node
    local_world: int = 0  # LOCAL_WORLD_SIZE; 0 = the workers of this agent


def rank_env(contract: WorkerContract, plan: Plan, node: Node, local_rank: int, error_file: str) -> dict[str, str]:
    """The variables that tell one worker its place (torchrun's names and meanings). `local_rank`: in its agent."""
    rank = plan.rank_offset + local_rank
    extra = {"NVRX_CURRENT_CYCLE_INFO": contract.cycle_info} if contract.cycle_info else {}
    return extra | {
        "RANK": str(rank),
        "LOCAL_RANK": str(contract.first_local + local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(contract.local_world or node.nproc),
        "GROUP_RANK": str(plan.group_rank),
        "GROUP_WORLD_SIZE": str(plan.active_nodes),
        "ROLE_NAME": contract.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(plan.cycle),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_RUN_ID": contract.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "NVRX_TERM": str(plan.term),
        "NVRX_CYCLE": str(plan.cycle),
        "NVRX_INFRA_RANK": str(node.infra_rank),
        "NVRX_RUN_DIR": contract.run_dir,
    }


def worker_env(inherited: Mapping[str, str], rank_vars: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Environment of one worker: what we inherited, torchrun's defaults where unset, then `rank_vars`."""
    env = dict(inherited)
    env.pop(TOKEN_ENV, None)  # users print their environment into logs
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.update(rank_vars)
    return env
