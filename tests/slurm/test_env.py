"""Where we are, told by variables recorded on Slurm 22.05 (four nodes, srun through sbatch) and varied."""

import re

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.env import array_infra_rank, coordinator_ports, detect

pytestmark = pytest.mark.fast


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


def seen(base, **changes):
    env = {**base, **{k: v for k, v in changes.items() if v is not None}}
    found = detect({k: v for k, v in env.items() if changes.get(k, "") is not None})
    assert found is not None
    return found


ARRAY_TASK = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}
SHRUNK = {"SLURM_STEP_NODELIST": "n[1,4]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
INHERITED = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (BATCH, {}, {"job_id": 7, "job_name_id": "7", "step_id": -1, "cpus_per_task": 2, "nnodes": 4}),
        (BATCH, {}, {"nodes": ("n1", "n2", "n3", "n4"), "restart_count": 0, "order": (), "infra_rank": 0}),
        (STEP, {}, {"step_id": 0, "procid": 1, "nodename": "n2"}),
        (STEP, SHRUNK, {"nodes": ("n1", "n4"), "nnodes": 2}),  # not the job's variables, which are older
        (STEP, INHERITED, {"step_id": -1, "nnodes": 4}),  # by the shell of an interactive step
        (STEP, {"SLURM_RESTART_COUNT": "2", "SLURM_GPUS_ON_NODE": "8"}, {"restart_count": 2, "gpus_per_node": 8}),
        (STEP, {**ARRAY_TASK, "SLURM_JOB_ID": "44"}, {"job_id": 44, "job_name_id": "40_3", "array_task_id": 3}),
        (STEP, {**ARRAY_TASK, "CROSS_SLURM_PROCID": "17"}, {"infra_rank": 17, "procid": 1}),
    ],
)
def test_what_the_variables_tell(base, changes, expected):
    found = seen(base, **changes)
    assert {name: getattr(found, name) for name in expected} == expected


def test_infra_ranks_of_an_array():
    assert detect({"SLURM_JOB_ID": "", "SLURM_PROCID": "0"}) is None  # no job
    assert array_infra_rank(seen(STEP)) == 1
    assert array_infra_rank(seen(STEP, **ARRAY_TASK)) == 3 * 4 + 1
    assert array_infra_rank(seen(STEP, **ARRAY_TASK, CROSS_SLURM_PROCID="17")) == 17


@pytest.mark.parametrize(
    ("text", "step_id"),
    [
        ("0", 0), ("4294967279", 4294967279), ("4294967280", -1), ("-6", -1), ("interactive", -1), ("", -1),
    ],
)  # fmt: skip
def test_special_steps_are_no_steps(text, step_id):
    assert seen(STEP, SLURM_STEP_ID=text, SLURM_STEPID=text).step_id == step_id


@pytest.mark.parametrize("text", ["2(x4)", "1(x3),2", "4"])
def test_one_launcher_per_node(text):
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        with pytest.raises(UsageError, match=re.escape(f"{name}={text}") + ".*--ntasks-per-node=1"):
            seen(STEP, **{"SLURM_STEP_TASKS_PER_NODE": None, name: text})
    assert seen(BATCH, SLURM_TASKS_PER_NODE=text).step_id == -1


@pytest.mark.parametrize("bad", ["x", "1.5", "١", "9" * 30])
def test_numbers_that_are_none(bad):
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        seen(STEP, SLURM_PROCID=bad)


@pytest.mark.parametrize(
    ("pattern", "addr", "order"),
    [
        ("block.node", "rack2-b01.n0x9", (2, 1, 0, 9)), ("switch.switch.node", "s0.s2.n17", ()), ("", "b1.n1", ()),
    ],
)  # fmt: skip
def test_topology_order(pattern, addr, order):
    assert seen(STEP, SLURM_TOPOLOGY_ADDR_PATTERN=pattern, SLURM_TOPOLOGY_ADDR=addr).order == order


def test_all_tasks_of_a_step_agree_on_the_ports():
    ports = coordinator_ports(seen(STEP))
    assert ports == coordinator_ports(seen(STEP, SLURM_PROCID="3", SLURM_NODEID="3", SLURMD_NODENAME="n4"))
    assert ports != coordinator_ports(seen(STEP, SLURM_STEP_ID="1"))
    assert ports != coordinator_ports(seen(STEP, SLURM_RESTART_COUNT="1"))
    assert ports != coordinator_ports(seen(STEP, SLURM_CONF="/other/slurm.conf"))

    assert len(set(ports)) == 8 and all(20000 <= port <= 29999 for port in ports)
