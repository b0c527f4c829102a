"""The event logs of simulated jobs, run again, give the same decisions."""

from __future__ import annotations

from dataclasses import replace

from nvrx_slurm.core.record import replay

from .world import World, random_settings


def test_logs_of_simulated_jobs_replay_identically() -> None:
    steps = 0
    for seed in range(100):
        world = World(replace(random_settings(seed, nodes=1 + seed % 8), record=True))
        world.run()
        for process in (*world.agents, *world.coordinators):
            steps += len(process.log)
            assert replay(process.log) == [], f"seed {seed}, {process.log[0]}"
    assert steps > 3_000


def test_the_log_of_a_job_with_80_nodes_replays_identically() -> None:
    world = World(replace(random_settings(seed=11, nodes=80), record=True))
    world.run()
    for process in (*world.agents, *world.coordinators):
        assert replay(process.log) == []
