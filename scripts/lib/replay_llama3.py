"""Llama 3's 54 days, replayed: its published interruptions, through the real cores. docs/explanation/replay-llama3.md
names every assumption.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import Any

from replay_world import KEEPALIVE_S, Latencies, ReplayWorld

from nvrx_slurm.core.account.figures import to_json
from nvrx_slurm.core.chain import ChainLimits, ChainLink, Next, decide
from nvrx_slurm.declared import plain
from nvrx_slurm.views.summary import summary
from tests.core.samples import agent_settings
from tests.sim.world import WorldSettings

DAY_S = 86400.0
NETWORK_HANGS = 0.5  # of network faults: nothing is heard any more, where the others end with an error
# Cause: (count in Table 5 of arXiv 2407.21783, what a launcher sees of it). 419 unexpected ones and 47 planned.
CAUSES: dict[str, tuple[int, str]] = {
    "Faulty GPU": (148, "device"),
    "GPU HBM3 memory": (72, "device"),
    "Software bug": (54, "error"),
    "Network switch or cable": (35, "network"),
    "Host maintenance, unplanned": (32, "node"),
    "GPU SRAM memory": (19, "device"),
    "GPU system processor": (17, "device_hang"),
    "NIC": (7, "network"),
    "NCCL watchdog timeouts": (7, "hang"),
    "Silent data corruption": (6, "corruption"),
    "GPU thermal interface and sensor": (6, "device"),
    "SSD": (3, "node"),
    "Power supply": (3, "node"),
    "Server chassis": (2, "node"),
    "IO expansion board": (2, "node"),
    "Dependency": (2, "error"),
    "CPU": (2, "node"),
    "System memory": (2, "node"),
    "Planned: firmware, configuration": (47, "maintenance"),
}
PUBLISHED = sum(count for count, _ in CAUSES.values())
USERS = ("import", "init", "reload", "productive", "checkpoint")
_AWAY = ("spare_idle", "excluded")
_MOST_RESTARTS = 100_000
_CHAIN = ChainLimits(3, 3600.0, 10)  # the defaults of --chain-failures and --chain-failure-window


@dataclass(frozen=True)
class Replay:
    """`thin`: nodes for which a simulated one stands. `days`: 54 of 2,048 nodes; with more nodes the same number of
    interruptions comes in a shorter time."""

    nodes: int = 2048
    spares: int = 32
    thin: int = 32
    faults: int = PUBLISHED
    every_s: float = 0.0  # between checkpoints; 0 = Young's interval
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def wall_s(self) -> float:
        """At the published rate of interruptions per node."""
        return 54 * DAY_S * 2048 / self.nodes * self.faults / PUBLISHED

    @property
    def mtbf_s(self) -> float:
        """Mean time between interruptions."""
        return self.wall_s / self.faults

    @property
    def interval_s(self) -> float:
        """Between checkpoints: sqrt(2 x save x MTBF), Young 1974."""
        return self.every_s or math.sqrt(2 * self.latencies.save_s * self.mtbf_s)

    def detect_s(self, kind: str) -> float:
        """From a fault until it is noticed."""
        one = self.latencies
        hang_s = one.hang_s + 4.0
        network_s = NETWORK_HANGS * hang_s + (1 - NETWORK_HANGS) * one.error_s
        return {
            "device": one.error_s, "error": one.error_s, "network": network_s, "node": KEEPALIVE_S,
            "hang": hang_s, "device_hang": hang_s, "corruption": one.unseen_s, "maintenance": 0.0,
        }[kind]  # fmt: skip

    def formula(self) -> float:
        """Meta's expected ETTR (arXiv 2410.21680): (1 - rate (u0 + dt / 2)) / (1 + w / dt)."""
        one, every_s = self.latencies, self.interval_s
        detect_s = sum(count * self.detect_s(kind) for count, kind in CAUSES.values()) / PUBLISHED
        lost_s = detect_s + one.init_s + one.load_s + every_s / 2
        blocked = one.save_s / every_s
        if one.disk_every_s:  # what is silently wrong is in memory, too
            share = sum(count for count, kind in CAUSES.values() if kind == "corruption") / PUBLISHED
            lost_s += share * (one.disk_load_s - one.load_s + (one.disk_every_s - every_s) / 2)
            blocked += one.disk_save_s / one.disk_every_s
        return (1 - lost_s / self.mtbf_s) / (1 + blocked)


@dataclass(frozen=True)
class Outcome:
    """One seed. Shares are of the wall time of a training node."""

    shares: Mapping[str, float]  # by bucket, with "queue"; their sum is 1
    ettr: float
    user_share: float  # of the time without recomputed steps
    of_allocation: float  # productive share, spares included
    restart_s: tuple[float, ...]  # fault noticed until the next plan
    links: int  # allocations
    struck: Counter[str]
    by_hand: int
    off_s: float  # by which the sum of a node's buckets differs from its wall time
    cpu_s: float
    marks: tuple[tuple[float, str], ...]  # the interruptions, (seconds, what is seen)


def _fates(replay: Replay, rng: random.Random) -> list[tuple[float, str]]:
    """Uniform in time: a Poisson process of which the count is known."""
    kinds = [kind for count, kind in CAUSES.values() for _ in range(count)]
    kinds = rng.sample(kinds, replay.faults) if replay.faults <= len(kinds) else rng.choices(kinds, k=replay.faults)
    network = [("device_hang" if rng.random() < NETWORK_HANGS else "device") for _ in kinds]
    seen = [other if kind == "network" else kind for kind, other in zip(kinds, network, strict=True)]
    return sorted((rng.uniform(0.0, replay.wall_s), kind) for kind in seen)


def run(replay: Replay, seed: int, judged: bool = False) -> Outcome:
    """One seed: allocations follow each other as a chain of jobs until the time is over."""
    cpu_s, rng = time.process_time(), random.Random(seed)
    fates = marks = _fates(replay, rng)
    sizes = replay.nodes // replay.thin + replay.spares, replay.nodes // replay.thin
    agent = agent_settings(hang_collect_s=2.0)
    at_s, struck, by_hand, runs, links = 0.0, Counter[str](), 0, [], list[ChainLink]()
    off_s, restart_s, queue_s = 0.0, list[float](), 0.0
    while at_s < replay.wall_s:
        settings = WorldSettings(*sizes, _MOST_RESTARTS, 2 * rng.randrange(1 << 30) + 1, nproc=1, faults=0, twice=0.0,
                                 agent=agent, join_timeout_s=300.0)  # fmt: skip
        coming = [(max(0.0, when - at_s), kind) for when, kind in fates]
        world = ReplayWorld(settings, replay.latencies, replay.interval_s, coming, replay.wall_s - at_s, replay.thin,
                            judged)  # fmt: skip
        world.run()
        came = [fate for fate, one in zip(fates, coming, strict=True) if not world.left_over[one]]
        struck.update(kind for _, kind in came)
        fates = [fate for fate, one in zip(fates, coming, strict=True) if world.left_over[one]]
        account = world.report.account
        assert account is not None, f"seed {seed}: the job ended with {world.code} and without an account"
        off_s = max(off_s, abs(sum(sum(node.seconds) for node in account.nodes) / sizes[0] - account.wall_s))
        runs.append({"account": to_json(account, queue_s), "restarts": plain(world.report.restarts)})
        restart_s += [one.down_s for one in world.report.restarts]
        at_s += account.wall_s
        links.append(ChainLink(world.code, at_s))
        if at_s < replay.wall_s:
            by_hand += decide(links, _CHAIN, at_s).next is not Next.CONTINUE
            queue_s = replay.latencies.requeue_s
            at_s += queue_s
    return _outcome(replay, runs, at_s, tuple(restart_s), struck, by_hand, off_s, time.process_time() - cpu_s, marks)


def _outcome(
    replay: Replay, runs: Sequence[Mapping[str, Any]], wall_s: float, restart_s: tuple[float, ...],
    struck: Counter[str], by_hand: int, off_s: float, cpu_s: float, marks: Sequence[tuple[float, str]],
) -> Outcome:  # fmt: skip
    found = summary(runs, 0.0, wall_s)
    times: dict[str, float] = dict(found["node_seconds"])
    active = replay.nodes // replay.thin
    away_s = {name: times.pop(name, 0.0) for name in _AWAY}
    times["queue"] = active * sum(run["account"]["queue_s"] for run in runs)
    sum_s = sum(times.values())
    shares = {name: took_s / sum_s for name, took_s in times.items()}
    allocated_s = replay.thin * (sum_s - times["queue"]) + sum(away_s.values())
    users = sum(shares.get(name, 0.0) for name in USERS) / (1 - shares.get("recomputed", 0.0))
    of_allocation = replay.thin * times["productive"] / allocated_s
    return Outcome(shares, found["job_ettr"], users, of_allocation, restart_s, len(runs), struck, by_hand, off_s, cpu_s,
                   tuple(marks))  # fmt: skip


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the range of 95 %."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=40, method="inclusive")
    return fmean(values), cuts[0], cuts[-1]


def buckets(outcomes: Sequence[Outcome]) -> list[tuple[str, tuple[float, float, float]]]:
    """Name and share of the wall time in percent, the largest first."""
    names = {name for one in outcomes for name in one.shares}
    found = [(name, spread([100 * one.shares.get(name, 0.0) for one in outcomes])) for name in names]
    return sorted(found, key=lambda one: -one[1][0])


def in_lines(replay: Replay, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The table."""
    faults, wall_days = Counter[str](), replay.wall_s / DAY_S
    for one in outcomes:
        faults += one.struck
    told = ", ".join(f"{kind} {count / len(outcomes):.0f}" for kind, count in faults.most_common())
    yield f"{replay.nodes:,} nodes and {replay.spares} spares, {wall_days:.2f} days, {len(outcomes)} seeds"
    yield f"interruptions per seed: {faults.total() / len(outcomes):.1f} ({told})"
    disk_s = replay.latencies.disk_every_s
    disk = f", in memory; every {disk_s:.0f} s on disk" if disk_s else ""
    yield f"a checkpoint every {replay.interval_s:.0f} s{disk}; a simulated node stands for {replay.thin}"
    yield f"{'of the wall time of a training node':<44} {'mean':>9}   95 % of seeds"
    for name, (mean, low, high) in buckets(outcomes):
        yield f"  {name:<42} {mean:7.3f} %   {low:.3f} to {high:.3f} %"
    rows: list[tuple[str, list[float]]] = [
        ("job ETTR", [100 * one.ettr for one in outcomes]),
        ("productive share of the allocation", [100 * one.of_allocation for one in outcomes]),
        ("in user code, without recomputed steps", [100 * one.user_share for one in outcomes]),
    ]
    for name, values in rows:
        mean, low, high = spread(values)
        yield f"{name:<44} {mean:7.3f} %   {low:.3f} to {high:.3f} %"
    yield f"{'Meta: formula for the same parameters':<44} {100 * replay.formula():7.3f} %"
    down, low, high = spread([took_s for one in outcomes for took_s in one.restart_s])
    yield f"{'fault noticed to next plan':<44} {down:7.3f} s   {low:.3f} to {high:.3f} s"
    yield f"{'allocations':<44} {fmean([one.links for one in outcomes]):7.1f}"
    yield f"{'steps by hand':<44} {sum(one.by_hand for one in outcomes):7}"
    yield f"{'most by which buckets miss the wall time':<44} {max(one.off_s for one in outcomes):7.5f} s"
    yield f"{'processor time per seed':<44} {fmean([one.cpu_s for one in outcomes]):7.1f} s"


def findings(replay: Replay, outcomes: Sequence[Outcome]) -> list[str]:
    """What the replay promises and does not hold."""
    found = []
    if (off := abs(fmean([one.ettr for one in outcomes]) - replay.formula())) > 0.02:
        found.append(f"the ETTR differs by {100 * off:.2f} points from Meta's formula")
    share = fmean([one.user_share for one in outcomes])
    if share < 0.995 and replay.nodes <= 2048:  # with more nodes faults come oftener, and hangs decide
        found.append(f"only {100 * share:.3f} % of the time is in user code")
    if steps := sum(one.by_hand for one in outcomes):
        found.append(f"{steps} steps by hand")
    if (off_s := max(one.off_s for one in outcomes)) > 0.001:
        found.append(f"the buckets of a node miss its wall time by {off_s:.4f} s")
    return found
