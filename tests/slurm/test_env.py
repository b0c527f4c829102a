"""Where we are, told by variables recorded on Slurm 22.05 (four nodes, srun through sbatch) and varied."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.env import SlurmContext, Where, array_infra_rank, coordinator_ports, detect

BATCH = {
    "SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "mini", "SLURM_CONF": "/r/slurm.conf", "SLURM_CPUS_ON_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2", "SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_TOPOLOGY_ADDR": "n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
}  # fmt: skip
STEP = {
    **BATCH, "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-4]", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_TOPOLOGY_ADDR": "n2",
}  # fmt: skip


def seen(base: dict[str, str], **changes: str | None) -> SlurmContext:
    env = {**base, **{k: v for k, v in changes.items() if v is not None}}
    found = detect({k: v for k, v in env.items() if changes.get(k, "") is not None})
    assert found is not None
    return found


@pytest.mark.parametrize("env", [{}, {"SLURM_CONF": "/r/slurm.conf"}, {"SLURM_JOB_ID": ""}, {"SLURM_PROCID": "0"}])
def test_not_in_a_job(env: dict[str, str]) -> None:
    assert detect(env) is None


def test_batch_script() -> None:
    found = seen(BATCH)
    assert (found.where, found.job_id, found.job_name_id, found.step_id) == (Where.BATCH, 7, "7", -1)
    assert (found.nodes, found.nnodes, found.cpus_per_task) == (("n1", "n2", "n3", "n4"), 4, 2)
    assert (found.restart_count, found.start_time, found.order, found.infra_rank) == (0, None, (), 0)


def test_step() -> None:
    found = seen(STEP)
    assert (found.where, found.step_id, found.procid, found.nodename) == (Where.STEP, 0, 1, "n2")


@pytest.mark.parametrize(
    ("step_id", "where"),
    [
        ("0", Where.STEP), ("5", Where.STEP), ("4294967279", Where.STEP), ("4294967280", Where.BATCH),
        ("4294967290", Where.BATCH), ("4294967294", Where.BATCH), ("4294967295", Where.BATCH), ("-6", Where.BATCH),
        ("interactive", Where.BATCH), ("batch", Where.BATCH), ("", Where.BATCH),
    ],
)  # fmt: skip
def test_special_steps_are_no_steps(step_id: str, where: Where) -> None:
    assert seen(STEP, SLURM_STEP_ID=step_id, SLURM_STEPID=step_id).where is where


def test_a_steps_own_variables_win_after_a_shrink() -> None:
    found = seen(STEP, SLURM_STEP_NODELIST="n[1,4]", SLURM_STEP_NUM_NODES="2", SLURM_STEP_TASKS_PER_NODE="1(x2)")
    assert (found.nodes, found.nnodes) == (("n1", "n4"), 2)


def test_step_variables_inherited_by_an_interactive_shell_do_not_count() -> None:
    found = seen(STEP, SLURM_STEP_ID="4294967290", SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE="2")
    assert (found.where, found.nnodes) == (Where.BATCH, 4)


@pytest.mark.parametrize("text", ["2(x4)", "1(x3),2", "4"])
def test_one_launcher_per_node(text: str) -> None:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        with pytest.raises(UsageError, match=re.escape(f"{name}={text}") + ".*--ntasks-per-node=1"):
            seen(STEP, **{"SLURM_STEP_TASKS_PER_NODE": None, name: text})
    assert seen(BATCH, SLURM_TASKS_PER_NODE=text).where is Where.BATCH


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_GPUS_ON_NODE", "CROSS_SLURM_PROCID"]
)
@pytest.mark.parametrize("bad", ["x", "1.5", "١", "9" * 30, "0x1"])
def test_numbers_that_are_none(name: str, bad: str) -> None:
    with pytest.raises(UsageError, match=name):
        seen(STEP, **{name: bad})


def test_job_array() -> None:
    found = seen(STEP, SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="3", SLURM_JOB_ID="44")
    assert (found.job_id, found.job_name_id, found.array_task_id) == (44, "40_3", 3)
    assert (array_infra_rank(found), found.infra_rank) == (3 * 4 + 1, 1)
    assert array_infra_rank(seen(STEP)) == 1


def test_cross_slurm_procid_wins() -> None:
    found = seen(STEP, CROSS_SLURM_PROCID="17", SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="3")
    assert (found.infra_rank, array_infra_rank(found), found.procid) == (17, 17, 1)


@pytest.mark.parametrize(
    ("pattern", "addr", "order"),
    [
        ("block.node", "b03.node17", (3, 17)), ("block.node", "rack2-b1.n0x9", (2, 1, 0, 9)),
        ("block.node", "b1.n10", (1, 10)), ("switch.switch.node", "s0.s2.n17", ()), ("node", "n2", ()),
        ("", "b1.n1", ()),
    ],
)  # fmt: skip
def test_topology_order(pattern: str, addr: str, order: tuple[int, ...]) -> None:
    assert seen(STEP, SLURM_TOPOLOGY_ADDR_PATTERN=pattern, SLURM_TOPOLOGY_ADDR=addr).order == order


def test_restart_count_gpus_and_times() -> None:
    found = seen(STEP, SLURM_RESTART_COUNT="2", SLURM_GPUS_ON_NODE="8", SLURM_JOB_START_TIME="1700000000")
    assert (found.restart_count, found.gpus_per_node, found.start_time) == (2, 8, 1700000000)


def test_all_tasks_of_a_step_agree_on_the_ports() -> None:
    ports = coordinator_ports(seen(STEP))
    assert ports == coordinator_ports(seen(STEP, SLURM_PROCID="3", SLURM_NODEID="3", SLURMD_NODENAME="n4"))
    assert ports != coordinator_ports(seen(STEP, SLURM_STEP_ID="1"))
    assert ports != coordinator_ports(seen(STEP, SLURM_RESTART_COUNT="1"))
    assert ports != coordinator_ports(seen(STEP, SLURM_CONF="/other/slurm.conf"))


@given(st.integers(0, 1 << 32), st.integers(0, 100), st.text(max_size=5))
def test_ports_are_distinct_and_in_range(job: int, step: int, cluster: str) -> None:
    ports = coordinator_ports(SlurmContext(Where.STEP, job, str(job), step_id=step, cluster_name=cluster))
    assert len(set(ports)) == len(ports) == 8
    assert all(20000 <= port <= 29999 for port in ports)
