"""What the environment and Slurm say about `nvrx-run`: places, nodes, domains, how nodes meet, what is noted first."""

import os
import subprocess
import sys

import pytest
from cli_harness import BATCH, BATCH_SCRIPT, ONE_TASK, REPO, SEVERAL, TASK
from standin import StandIn

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.here import OnNode, StartPlace, find_here, node_range, on_node, workers_per_node
from nvrx_slurm.cli.job import make_job, numa_bindings
from nvrx_slurm.cli.notes import notes
from nvrx_slurm.cli.rendezvous import node_domain
from nvrx_slurm.config.layers import resolve
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import conf
from nvrx_slurm.slurm.munge import Munge
from nvrx_slurm.system import gpus, numa

pytestmark = pytest.mark.fast


TWO_HOSTS = {"SLURM_STEP_NODELIST": "localhost,n2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
INTERACTIVE = {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PROCID": "0"}
TWO_EACH = {**TASK, **SEVERAL, "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
BLOCK = {"SLURM_TOPOLOGY_ADDR_PATTERN": "block.node", "SLURM_TOPOLOGY_ADDR": "b7.n2"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
ENDPOINT = {"rdzv_endpoint": "h:29400", "nnodes": "4"}
GROUP = {"NVRX_REPLACEMENT_GROUP_ID": "rack 9"}
SEGMENT = {"ft_segment": "2"}


def of(env, flags=None):
    return find_here(resolve(flags or {}, env), env)


@pytest.mark.parametrize(
    "env, flags, expected",
    [
        ({}, {}, StartPlace.LOGIN),
        ({}, {"standalone": True}, StartPlace.ALONE),
        ({}, {"nnodes": "1"}, StartPlace.ALONE),
        ({}, {"nnodes": "2", "dry_run": True}, StartPlace.LOGIN),
        ({}, {"nnodes": "2", "node_rank": "0", "rdzv_endpoint": "h:29400"}, StartPlace.ALONE),
        ({}, {"master_addr": "h", "nnodes": "2"}, StartPlace.ALONE),
        (BATCH, {}, StartPlace.BATCH),  # an salloc shell on the login node
        (BATCH_SCRIPT, {}, StartPlace.BATCH),
        (INTERACTIVE, {}, StartPlace.BATCH),  # salloc with LaunchParameters=use_interactive_step
        (TASK, {}, StartPlace.TASK),
        (TASK, {"standalone": True}, StartPlace.ALONE),
        ({**TASK, "NVRX_STEP": "7.0"}, {}, StartPlace.ALONE),  # a rank started it
        ({**BATCH_SCRIPT, "NVRX_STEP": "7."}, {}, StartPlace.ALONE),  # one of --standalone
        ({"NVRX_STEP": "."}, {}, StartPlace.ALONE),
        ({**TASK, "NVRX_STEP": "7.0", "SLURM_STEP_ID": "1"}, {}, StartPlace.TASK),  # by an srun of its own
        ({**BATCH_SCRIPT, "NVRX_STEP": "6.0"}, {}, StartPlace.BATCH),  # a rank submitted it
        ({**BATCH_SCRIPT, "NVRX_STEP": "."}, {}, StartPlace.BATCH),
    ],
)
def test_places(cluster, env, flags, expected):
    full = {**cluster, **env}
    assert of(full, flags).place is expected


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, (3, 3)), ({"spares": "1"}, (2, 3)), ({"nnodes": "2"}, (2, 3)), ({"nnodes": "1:2"}, (1, 3)),
        ({"nnodes": "2", "spares": "1"}, (2, 3)), ({"nnodes": "4"}, None), ({"nnodes": "3", "spares": "1"}, None),
    ],
)  # fmt: skip
def test_nodes_beyond_min_are_spares(flags, expected):
    here = of(TASK, flags)
    if expected is None:
        with pytest.raises(UsageError, match="4 nodes but the allocation has 3"):
            node_range(here)
    else:
        assert node_range(here) == expected


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({}, 4), ({"ZE_AFFINITY_MASK": "0,1"}, 2), ({"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),
    ],
)  # fmt: skip
def test_gpus_are_those_of_slurm_that_the_lists_name(lists, expected):
    env = {**ONE_TASK, "SLURM_GPUS_ON_NODE": "4", **lists}
    for flags in ({}, {"nproc_per_node": "gpu"}, {"nproc_per_node": "auto"}):
        assert workers_per_node(of(env, flags)) == expected


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"SLURM_PROCID": "2"}, 2), ({"SLURM_PROCID": "2", "CROSS_SLURM_PROCID": "5", "GROUP_RANK": "1"}, 5),
        ({"SLURM_PROCID": "2", "GROUP_RANK": "1"}, 2), ({"GROUP_RANK": "1"}, 1), ({"SLURM_PROCID": "x"}, -1),
    ],
)  # fmt: skip
def test_slurms_order_counts_without_the_rest_of_its_variables(env, rank):
    here = of(env, {**ENDPOINT, "rdzv_endpoint": "127.0.0.1:29400"})
    assert rendezvous.node(here, rendezvous.meeting(here, NodeRange(4, 4)), 1).infra_rank == rank


def test_an_endpoint_with_port_0_is_one_node_that_meets_no_other():
    here = of({}, {"rdzv_endpoint": "localhost:0", "rdzv_backend": "c10d"})
    assert rendezvous.meeting(here, NodeRange(1, 1)) is None


@pytest.mark.parametrize(
    "in_slurm, munge, given, token",
    [
        (True, True, "", ""), (True, True, "secret", "secret"), (False, True, "", "hash"), (True, False, "", "hash"),
    ],
)  # fmt: skip
def test_where_the_token_of_an_endpoint_comes_from(monkeypatch, in_slurm, munge, given, token):
    """ "": MUNGE hands it over. A hash of --rdzv-id is no secret."""
    monkeypatch.setattr(Munge, "answers", lambda socket: munge)
    env = {"NVRX_TOKEN": given, "NVRX_MUNGE_SOCKET": "/s"} | (TASK if in_slurm else {})
    here = of(env, {"rdzv_endpoint": "h:29400"})
    found = rendezvous.meeting(here, NodeRange(3, 3))
    assert found.munge_socket == ("/s" if in_slurm else None)
    assert found.token == token or (token == "hash" and len(found.token) == 64)
    assert bool(rendezvous.token_note(here, found)) == (token == "hash")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ClusterName=c\nAuthInfo=socket=/run/m2/s,ttl=60\n", "/run/m2/s"), ("authinfo = ttl=9,socket=/m # x\n", "/m"),
        ("#AuthInfo=socket=/x\n", None), ("AuthInfo=ttl=60\n", None), ("", None),
    ],
)  # fmt: skip
def test_the_socket_of_slurms_munged_is_in_slurm_conf(tmp_path, text, expected):
    (tmp_path / "slurm.conf").write_text(text)
    env = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert conf.munge_socket(env) == expected
    assert conf.munge_socket({**env, "NVRX_MUNGE_SOCKET": "/mine"}) == "/mine"
    assert conf.munge_socket({"SLURM_CONF": str(tmp_path)}) is None


@pytest.mark.parametrize(
    "flags, env, said",
    [
        ({"term_timeout": "100"}, {**ONE_TASK, "NVRX_KILL_WAIT": "30"}, "--term-timeout '100' is cut to 25 s"),
        ({}, {**ONE_TASK, "PET_TERM_TIMEOUT": "60"}, "PET_TERM_TIMEOUT='60' is cut to 25 s"),
        ({"term_timeout": "20"}, ONE_TASK, ""),
        ({}, ONE_TASK, ""),  # the default is not what the user asked for
        ({"ft_warn_before_end": "60"}, {**ONE_TASK, "PATH": "/nowhere"}, "time limit is unknown"),
        ({}, {**ONE_TASK, **TWO_HOSTS, "NVRX_TOKEN": "0" * 32, "PATH": "/nowhere"}, "scancel 7"),
        ({"monitor_interval": "7"}, {}, "--monitor-interval has no effect"),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_notes(work, clean, flags, env, said):
    here = of(env, flags)
    found = [note for note in notes(here, make_job(here, "train.py", ())) if "hangs are" not in note]
    assert [said in note for note in found] == [True] * bool(said)


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr(gpus._Process, "no_library", True)


@pytest.mark.parametrize(
    "flags, env, expected",
    [
        ({}, BLOCK, ""),  # no segments
        (SEGMENT, BLOCK, "block b7"),
        (SEGMENT, {**BLOCK, **ARRAY}, "block b7"),
        (SEGMENT | ENDPOINT, ARRAY, "array task 3"),
        (SEGMENT | ENDPOINT, {**BLOCK, **ARRAY, **GROUP}, "rack 9"),
        (SEGMENT, ARRAY, None),  # each task is a job of its own
        (SEGMENT, {**BLOCK, "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, None),
        (SEGMENT, {}, None),
    ],
)
def test_where_the_domain_comes_from(no_gpus, flags, env, expected):
    if expected is None:
        with pytest.raises(UsageError, match="--ft-segment 2 needs .*no libnvidia.*NVRX_REPLACEMENT_GROUP_ID"):
            node_domain(of(TASK | env, flags))
    else:
        assert node_domain(of(TASK | env, flags)) == expected


OWN_STEP = {**ONE_TASK, "SLURM_STEP_ID": "4"}
MEETS = {"rdzv_endpoint": "localhost:29400", "nnodes": "2"}


@pytest.mark.parametrize(
    "env, flags, rank, coordinates",
    [
        ({**TASK, "SLURM_PROCID": "2"}, {**MEETS, "node_rank": "0"}, 2, False),  # one step: Slurm knows better
        (OWN_STEP, {**MEETS, "node_rank": "1"}, 1, False),  # a step per node
        (OWN_STEP, {**MEETS, "node_rank": "0"}, 0, True),
        (OWN_STEP, MEETS, -1, True),  # the endpoint is its own
        ({**OWN_STEP, "CROSS_SLURM_PROCID": "3"}, MEETS, 3, False),
        ({**OWN_STEP, **ARRAY}, MEETS, 3, False),  # tasks of an array are one job
        ({**OWN_STEP, **ARRAY}, {"rdzv_endpoint": "localhost:29400"}, 0, True),  # or one job each, in a sweep
        ({**TASK, **ARRAY, "SLURM_PROCID": "1"}, {**MEETS, "nnodes": "3"}, 1, False),
        ({**TASK, **ARRAY, "SLURM_PROCID": "1"}, {**MEETS, "nnodes": "3", "ft_segment": "3"}, 10, False),  # a group
        ({**TASK, "SLURM_PROCID": "1"}, {**MEETS, "nnodes": "1:8", "node_rank": "5"}, 1, False),  # elastic, one step
    ],
)
def test_the_rank_of_a_node_that_meets_others_at_an_endpoint(work, clean, env, flags, rank, coordinates):
    job = make_job(of(env, flags), "train.py", ())
    assert (job.node.infra_rank, job.coordinator is not None) == (rank, coordinates)


ASKS = """
import os
from nvrx_slurm.cli.here import find_here
from nvrx_slurm.cli.rendezvous import node_domain
from nvrx_slurm.config.layers import resolve
from nvrx_slurm.errors import UsageError
try:
    print(node_domain(find_here(resolve({"ft_segment": "2"}, {}), os.environ)))
except UsageError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(
    "state, expected",
    [
        (["gpus 2", "cluster_uuid 171"], "ab" * 16),
        (["gpus 2"], "block b7"),  # all zero: NVLink does not leave the node
        (["gpus 2", "nvmlDeviceGetGpuFabricInfoV 13"], "block b7"),  # a driver that does not have it
        (["gpus 2", "cluster_uuid 171", "nvmlDeviceGetGpuFabricInfoV 999"], "refused: --ft-segment needs"),
    ],
)
def test_the_domain_of_gpus(nvml_standin, tmp_path, state, expected):
    stand_in = StandIn(nvml_standin, tmp_path / "state")
    stand_in.say(*state)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), **TASK, **BLOCK, **stand_in.env}
    done = subprocess.run([sys.executable, "-c", ASKS], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(expected), done


def test_agents_are_counted_by_tasks():
    here = of(TWO_EACH, {"spares": "2"})
    assert here.slurm.agents == ("n1", "n1", "n2", "n2", "n3", "n3")
    nodes = node_range(here)
    assert (nodes.min, nodes.max) == (4, 6)
    cyclic = TWO_EACH | {"SLURM_DISTRIBUTION": "cyclic"}
    around = of(cyclic).slurm
    assert around.agents == ("n1", "n2", "n3", "n1", "n2", "n3")


def test_the_job_of_a_second_agent(clean, work):
    env = TWO_EACH | {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    env |= {"SLURMD_NODENAME": "localhost"}
    job = make_job(of(env, {"nproc_per_node": "4"}), "train.py", ())
    assert (job.electable.electors, job.electable.min_nodes, job.electable.expected) == (2, 2, ("localhost",) * 2)
    assert [peer.key for peer in job.meeting.candidates] == ["0", "1"] and job.node.infra_rank == 1
    assert (job.spec.contract.first_local, job.spec.contract.local_world) == (4, 8)
    assert job.preflight.reclaim.gpus == (4, 8)


@pytest.mark.parametrize(
    "visible, nproc, expected",
    [(None, 2, (2, 2, 4)), ("0,1,2,3", 2, (2, 2, 4)), ("2,3", 2, (2, 0, 2)), ("", 1, (1, 1, 2)), ("5", 1, (1, 0, 1))],
)
def test_local_ranks(no_gpus, visible, nproc, expected):
    env = TWO_EACH if visible is None else TWO_EACH | {"CUDA_VISIBLE_DEVICES": visible}
    assert on_node(of(env), nproc) == expected
    assert on_node(of({}), nproc) == on_node(of(TASK), nproc) == (0, 0, nproc)


@pytest.mark.parametrize(
    "base, changes, expected",
    [
        (TASK, {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, 4),
        (TASK, {}, 1),
        (TASK, {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, None),
        (BATCH_SCRIPT, {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "6"}, 2),
        (BATCH_SCRIPT, {"SLURM_NTASKS": "6"}, 2),
        (BATCH_SCRIPT, {"SLURM_NTASKS": "5"}, None),
        (BATCH_SCRIPT, {"SLURM_TASKS_PER_NODE": "64(x3)"}, 1),  # CPUs
    ],
)
def test_tasks_per_node(base, changes, expected):
    env = {**base, **SEVERAL, **changes}
    if expected is None:
        with pytest.raises(UsageError, match="the same number of tasks on each node"):
            of(env)
        return
    here = of(env | {"SLURM_GPUS_ON_NODE": "8"})
    assert here.slurm.launchers == expected
    assert workers_per_node(here) == 8 // expected


def test_numa_nodes_are_those_of_all_workers_of_the_node(monkeypatch):
    """By number they count from the node's first worker, also where each task sees only GPUs of its own."""
    monkeypatch.setattr(numa, "prefixes", lambda nproc, per_numa, strict: tuple((str(i),) for i in range(nproc)))
    here = of({"NVRX_GPUS_PER_NUMA": "2"})
    assert [where.prefix for where in numa_bindings(here, 2, OnNode(2, 0, 2))] == [("2",), ("3",)]


def test_group_ranks_by_the_digits_of_node_names():
    env = {**TASK, "SLURMD_NODENAME": "rack2-n013", "NVRX_INFRA_RANK_FROM_NODENAME": "1", **BLOCK}
    slurm = of(env).slurm
    assert (slurm.order, slurm.infra_rank) == ((2013,), 1)
