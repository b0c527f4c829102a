"""Records as the tests of the cores use them: nodes h0, h1, ... with two workers each."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.config import cores
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.coordinator import CoordinatorSettings
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.declared import replace

PREFLIGHT_S, TERM_S = 25.0, 25.0  # the longest preflight; what Slurm leaves after SIGTERM


def agent_settings(**changes) -> AgentSettings:
    """Those of the product, with these changes."""
    policy = changes.get("policy", t.RestartPolicy.ANY_FAILED)
    ft = FaultToleranceConfig(restart_policy=policy.value)
    return replace(cores.agent_settings(Config(ft=ft), TERM_S), **changes)


def restart_limits(**changes) -> RestartLimits:
    """Those of the product, with these changes."""
    return replace(cores.restart_limits(Config().ft), **changes)


def coordinator_settings(**changes) -> CoordinatorSettings:
    """Those of the product, with these changes."""
    policy = changes.get("policy", t.RestartPolicy.ANY_FAILED)
    return replace(cores.coordinator_settings(Config(), agent_settings(policy=policy), PREFLIGHT_S), **changes)


def a_node(rank: int, life: int = 0, nproc: int = 2, domain: str = "") -> t.Node:
    """The agent's `life` on the host with that infra rank."""
    return t.Node(f"h{rank}.{life}", rank, f"h{rank}", f"10.0.0.{rank}", nproc, domain=domain)


def a_fault(rank: int, kind: t.FaultKind = t.FaultKind.EXIT, code: int = 1, local_rank: int = 0) -> t.RankFault:
    """Of a worker on the host with infra rank `rank`."""
    return t.RankFault(kind, f"h{rank}", rank, 2 * rank + local_rank, local_rank, 4711, code, "boom")


def a_plan(cycle: int = 0, group_rank: int = 0, term: int = 1, active: int = 2, used: int | None = None) -> t.Plan:
    """Nodes with two workers each; group_rank -1 = for a spare."""
    offset = 2 * group_rank if group_rank >= 0 else -1
    history = t.History(cycle if used is None else used)
    return t.Plan(term, cycle, history, 3, active, 2 * active, "10.0.0.0", 1000, group_rank, offset)
