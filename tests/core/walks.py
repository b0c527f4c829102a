"""Random walks of a coordinator: any well-typed messages, from any node, in any order."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.machine import Tick

_KINDS = (t.FaultKind.EXIT, *t.FaultKind)


class Walk:
    """One coordinator and what it may be told; equal seeds give equal walks."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        least = rng.choice((1, 1, 2, 3))
        segment = (None, None, 1, least)[seed % 4]
        most, restarts, policy = (
            max(least, rng.choice((1, 2, 3, 4))),
            rng.choice((1, 9, 99)),
            rng.choice(list(t.RestartPolicy)),
        )
        self.core = Coordinator(
            CoordinatorSettings(
                term=2,
                min_nodes=least,
                max_nodes=most,
                max_restarts=restarts,
                policy=policy if segment is None else t.RestartPolicy.ANY_FAILED,
                segment=segment,
                has_preflight=rng.random() < 0.5,
                hang_collect_s=1.5,
                hang_exclude=rng.random() < 0.5,
                tracks_progress=rng.random() < 0.4,
                time_limited=rng.random() < 0.4,
                warn_before_end_s=5.0,
                stop_before_end_s=2.0,
                peer=(me := t.Peer("0", "h0", "", 7000) if rng.random() < 0.3 else None),
                electors=rng.choice((2, 3)) if me is not None else 0,
                known=(t.Peer("1", "h1", "", 7000), t.Peer("2", "h2", "", 7000)),
                quorum_timeout_s=rng.choice((0.0, 40.0)),
            ),
            0.0,
        )
        self.now = 0.0

    def step(self) -> list[Any]:
        """Tell it something; returns the commands."""
        event = self._event()
        if isinstance(event, Tick):
            self.now = max(self.now, self.core.deadline() or self.now)
        else:
            self.now += self.rng.choice((0.0, 0.0, 0.1, 2.0))
        commands = self.core.step(event, self.now)
        self.core.validate()
        return commands

    def _event(self) -> Any:
        rng, node = self.rng, self._node()
        told = partial(ev.FromAgent, node.node_id)
        return rng.choices(
            (
                lambda: ev.Joined(
                    t.Register(node, 1, self._plan(node), rng.choice(list(t.Activity)), self._faults(), _rare(rng))
                ),
                lambda: ev.Lost(node.node_id, "reset"),
                lambda: told(t.RanksFailed(1, self._cycle(), self._faults())),
                lambda: told(t.Succeeded(1, self._cycle(), _rare(rng))),
                lambda: told(t.Ready(rng.randrange(2), self._cycle(), 1)),
                lambda: ev.FromAgent(
                    node.node_id, t.Asked(1, self._cycle(), rng.choice(list(t.WorkloadAction)), 0, "so")
                ),
                lambda: told(t.NodeUnfit(1, self._cycle(), "so")),
                lambda: told(t.WarnJob(10, "soon")),
                lambda: told(t.EndJob(143, "told", 15)),
                lambda: ev.TimeLeftRead(rng.choice((None, 1.0, 30.0, 1e5, 1e5, 1e5))),
                lambda: ev.ProgressRead(rng.choice((-1, self.core.job.cycle)), rng.choice((None, 5, 9))),
                lambda: Tick(),
                lambda: ev.ProvenDead(t.Peer(str(rng.randrange(3)), f"h{rng.randrange(3)}", "", 7000)),
                lambda: ev.Raised(self.core.job.term + 1),
                lambda: told(t.EndKnown()),
                lambda: told(t.Hung(1, self._cycle(), t.RankFault(t.FaultKind.HANG, node.host, node.infra_rank, 0))),
                lambda: told(t.Evidence(1, self._cycle(), self._evidence(node))),
            ),
            (30, 8, 10, 6, 25, 2, 0.5, 1, 0.5, 2, 4, 12, 3, 1, 1, 2, 8),
        )[0]()

    def _node(self) -> t.Node:
        host = self.rng.randrange(3)
        rank = host if self.rng.random() < 0.95 else self.rng.randrange(-1, 4)
        return t.Node(
            f"h{host}.{int(_rare(self.rng))}", rank, f"h{host}", "", self.rng.choice((1, 2)), domain="ab"[rank % 2]
        )

    def _cycle(self) -> int:
        cycle = self.core.job.cycle
        return cycle if self.rng.random() < 0.9 else self.rng.choice((cycle - 1, cycle + 1, -1, 0, 9, 10**7))

    def _faults(self) -> tuple[t.RankFault, ...]:
        return tuple(
            t.RankFault(
                self.rng.choice(_KINDS), "h1", 1, self.rng.choice((-1, 0, 0)), 0, 1, self.rng.randrange(-9, 9), "x"
            )
            for _ in range(self.rng.choice((0, 1, 1, 2)))
        )

    def _evidence(self, node: t.Node) -> tuple[t.RankEvidence, ...]:
        frame = self.rng.choice(("/w/train.py:9 in load", "/x/torch/distributed/c10d.py:1 in barrier"))
        return (t.RankEvidence(self.rng.randrange(4), node.infra_rank, node.host, "S", frames=(frame,)),)

    def _plan(self, node: t.Node) -> t.Plan | None:
        rng, here = self.rng, self.core.job.assignment.group_ranks.get(node.node_id)
        if rng.random() < 0.4:
            return None
        active = rng.choice((1, 2, 3))
        group_rank = (
            here if here is not None and rng.random() < 0.8 else rng.choice((-1, int(node.host[1:]), rng.randrange(4)))
        )
        excluded = tuple(rng.sample(["0@h0", "2@h2"], 1)) if rng.random() < 0.02 else ()
        history = t.History(rng.randrange(2), (), 0, rng.randrange(-1, 9), excluded)
        return t.Plan(1, max(0, self._cycle()), history, 3, active, 2 * active, "a", 1, group_rank, 2 * group_rank)


def _rare(rng: random.Random) -> bool:
    return rng.random() < 0.05


def walk(seed: int, steps: int = 80) -> Coordinator:
    """A whole walk; returns the coordinator at its end."""
    one = Walk(seed)
    while steps and one.core.state.name != "CLOSED":
        one.step()
        steps -= 1
    return one.core
