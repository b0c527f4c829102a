"""Records as the tests of the cores use them: nodes h0, h1, ... with two workers each."""

from nvrx_slurm import types as t
from nvrx_slurm.config import cores
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.layers import Config
from nvrx_slurm.declared import replace

PREFLIGHT_S, TERM_S = 25.0, 25.0  # the longest preflight; what Slurm leaves after SIGTERM


def agent_settings(**changes):
    """Those of the product, with these changes."""
    policy = changes.get("policy", t.RestartPolicy.ANY_FAILED)
    ft = FaultToleranceConfig(restart_policy=policy.value)
    return replace(cores.agent_settings(Config(ft=ft), TERM_S), **changes)


def restart_limits(**changes):
    """Those of the product, with these changes."""
    return replace(cores.restart_limits(Config().ft), **changes)


def coordinator_settings(**changes):
    """Those of the product, with these changes."""
    policy = changes.get("policy", t.RestartPolicy.ANY_FAILED)
    return replace(cores.coordinator_settings(Config(), agent_settings(policy=policy), PREFLIGHT_S), **changes)


def a_node(rank, life=0, nproc=2, domain=""):
    """The agent's `life` on the host with that infra rank."""
    return t.Node(f"h{rank}.{life}", rank, f"h{rank}", f"10.0.0.{rank}", nproc, domain=domain)


def a_fault(rank, kind=t.FaultKind.EXIT, code=1, local_rank=0):
    """Of a worker on the host with infra rank `rank`."""
    return t.RankFault(kind, f"h{rank}", rank, 2 * rank + local_rank, local_rank, 4711, code, "boom")


def a_plan(cycle=0, group_rank=0, term=1, active=2, used=None):
    """Nodes with two workers each; group_rank -1 = for a spare."""
    offset = 2 * group_rank if group_rank >= 0 else -1
    history = t.History(cycle if used is None else used)
    return t.Plan(term, cycle, history, 3, active, 2 * active, "10.0.0.0", 1000, group_rank, offset)
