"""The coordinator's node of a large job falls silent: each agent notices at its own time, each vote takes time."""

from __future__ import annotations

import pytest
from replay_world import Latencies, ReplayWorld

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election.events import LEADER_SHARE, LEASE_SHARE, MEMBER_SHARE

from . import network, process, processes, world
from .world import WorldSettings

pytestmark = pytest.mark.fast


LEASE_S = 10.0  # by default
TIMES = {
    "COORDINATOR_KEEPALIVE_S": LEASE_S, "AGENT_KEEPALIVE_S": MEMBER_SHARE * LEASE_S,
    "LEASE_S": LEASE_SHARE * LEASE_S, "LEADS_S": LEADER_SHARE * LEASE_S,
}  # fmt: skip
FALLS_SILENT_S = 60.0


class _World(ReplayWorld):
    """`won`: the terms in which a coordinator has been elected."""

    won: tuple[int, ...] = ()

    def silence(self):
        """The node of the coordinator. An agent notices when no beat has been answered for a while, the next candidate
        last of all."""
        lost = self.coordinator.agent
        streams = [agent.stream for agent in self.living_agents() if agent is not lost and agent.stream is not None]
        lost.vanish()
        for stream in streams:
            earliest = MEMBER_SHARE / (1 if stream is streams[0] else 2)
            notices_s = self.rng.uniform(earliest, MEMBER_SHARE) * LEASE_S
            self.clock.after(notices_s, stream.break_at_agent, "silent", True)

    def stepped(self, one, event, commands):
        self.won += tuple(one.core.job.term for command in commands if isinstance(command, ev.Won))


@pytest.mark.parametrize("nodes", [1024, *(pytest.param(n, marks=pytest.mark.matrix) for n in (4096, 16384))])
def test_an_election_comes_to_an_end_while_votes_come_slowly(nodes, monkeypatch):
    """All votes take as long as 16,384 with 0.15 ms each. Within 15 s all nodes have a new coordinator."""
    for module in (network, process, processes, world):
        for name in TIMES.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, TIMES[name])
    settings = WorldSettings(nodes, nodes - 4, 1, 1, nproc=1, faults=0, twice=0.0, join_timeout_s=300.0)
    job = _World(settings, Latencies(message_s=0.00015 * 16384 / nodes), 60.0, (), 600.0)
    job.clock.at(FALLS_SILENT_S, job.silence)
    while job.clock.now < FALLS_SILENT_S + 15.0:
        job.clock.step()
    assert job.won[0] == 1 and len(job.won) == 2 and job.won[1] <= 4, job.won
    assert len(job.coordinator.core.roster.members) == nodes - 1
    assert not job.coordinator.core.job.fresh  # it has decided about the cycle that ran
