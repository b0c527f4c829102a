"""What ranks get of the job's share of their node, by headers that describe other tasks, and of the user's settings."""

import json

import pytest
from minicluster import MiniCluster
from nvrx_job import Jobs

from nvrx_slurm.slurm import share

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d")]

TELLS = """
import json, subprocess
step = os.environ["SLURM_JOB_ID"] + "." + os.environ["SLURM_STEP_ID"]
shown = subprocess.run(["scontrol", "show", "step", step], capture_output=True, text=True).stdout
told = {"cpus": len(os.sched_getaffinity(0)), "step": shown, **os.environ}
with open(os.environ["TEST_JOB"] + f"/told-{os.environ.get('WHICH', '')}{RANK}", "w") as file:
    json.dump(told, file)
"""
PER_GPU = ("--ntasks-per-node=2", "--cpus-per-task=1")


def told(job):
    """What each rank told of itself: its environment, its CPUs, its step."""
    return [json.loads(file.read_text()) for file in sorted(job.directory.glob("told-*"))]


@pytest.mark.parametrize(
    ("header", "gpus", "memory"),
    [
        ((*PER_GPU, "--gpus-per-task=1", "--mem-per-cpu=1000"), 2, "4000M"),
        ((*PER_GPU, "--gpus-per-task=a100:2", "--mem-per-gpu=500"), 4, "4000M"),
        ((*PER_GPU, "--gres=gpu:4", "--mem=6000"), 4, "12000M"),
        (("--ntasks-per-node=1", "--gpus-per-node=2", "--cpus-per-gpu=1", "--gpu-bind=single:1"), 2, "16000M"),
        ((*PER_GPU, "--hint=nomultithread", "--gpus-per-node=2", "--mem=1000"), 2, "2000M"),
    ],
    ids=["per task", "typed", "gres", "per gpu", "hint"],
)
def test_ranks_have_all_that_the_job_has_of_their_node(varied, header, gpus, memory):
    job = varied.submit(TELLS, "", 2, header, lead="export SLURM_CPU_BIND=mask_cpu:0x1")
    job.ends("COMPLETED", 0)
    assert len(told(job)) == 2 * gpus, job.said()
    for one in told(job):
        assert one["cpus"] == varied.cluster.settings.cpus_per_node and one["LOCAL_WORLD_SIZE"] == f"{gpus}"
        assert len(one["CUDA_VISIBLE_DEVICES"].split(",")) == gpus and f"mem={memory}," in one["step"], one["step"]
        assert one.get("SLURM_CPUS_PER_TASK") == ("1" if PER_GPU[1] in header else None)


def test_nodes_with_different_numbers_of_tasks(varied: Jobs):
    """Each has its own share of the job."""
    job = varied.new(TELLS)
    header = ("--nodes=2", "--ntasks=3", "--gpus-per-task=1", "--mem-per-cpu=1000", f"--chdir={job.directory}")
    job.job_id = varied.cluster.submit("#!/bin/bash\nexec nvrx-run worker.py\n", *header, *varied.environment(job))
    job.ends("COMPLETED", 0)
    shares = [(one["LOCAL_WORLD_SIZE"], one["cpus"], one["CUDA_VISIBLE_DEVICES"]) for one in told(job)]
    assert shares == [("2", 2, "0,1"), ("2", 2, "0,1"), ("1", 1, "0")], job.said()


@pytest.mark.parametrize("has", [("--gpus-per-task=1", "--mem-per-cpu=500"), ("--gpus-per-node=1", "--mem=500")])
def test_a_job_that_another_one_submits_has_nothing_of_it(varied: Jobs, has):
    """sbatch passes on that the one which calls it is in an array, was requeued, and what it has of its node."""
    job = varied.new(TELLS)
    inner = "sbatch --wait --nodes=2 --gres=gpu:2 --mem=1000 --wrap 'exec nvrx-run worker.py'"
    header = ("--array=3", "--nodes=1", "--ntasks=1", *has, f"--chdir={job.directory}")
    script = f"#!/bin/bash\nexport SLURM_RESTART_COUNT=1\n{inner}\n"
    job.job_id = varied.cluster.submit(script, *header, *varied.environment(job))
    job.ends("COMPLETED", 0)
    assert len(told(job)) == 4
    for one in told(job):
        assert one["NVRX_RUN_DIR"].endswith(f"/nvrx_logs/{one['SLURM_JOB_ID']}/r0") and "mem=2000M," in one["step"]
        assert not {"SLURM_ARRAY_TASK_ID", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & {*one}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("env", "cpus", "said"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x4)"}, 8, "8 of 64 CPUs"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64(x4)"}, 32, ""),  # without the second thread of each core
        ({"SLURM_JOB_CPUS_PER_NODE": "128"}, 16, ""),  # a pretended node: the machine has no more
        ({"SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_GPUS": "0,1,2,3"}, 16, "1 of 4 GPUs"),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1,2,3"}, 16, ""),
        ({}, 1, ""),
    ],
)
def test_a_task_with_a_small_part_of_its_job_says_so(env, cpus, said):
    machine = 16 if "128" in env.values() else 64
    for of_front in (False, True):
        found = share.lost(env, cpus, machine, of_front)
        assert said in found and bool(said) is bool(found)
        assert ("without srun" in found) is (bool(said) and not of_front)


@pytest.mark.parametrize("slurm", ["", pytest.param("26.05", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("vendor", "name"),
    [
        ("amd", "ROCR_VISIBLE_DEVICES"),
        ("intel", "ZE_AFFINITY_MASK"),
    ],
)
def test_gpus_that_nvml_does_not_know_are_counted_by_slurm(vendor, name, slurm, needs_slurm, cluster_root):
    """Slurm lists them by another variable. A node without NVML is not unfit."""
    if reason := MiniCluster.available(slurm):
        pytest.skip(reason)
    given = {"kill_wait_s": 5, "die_with_owner": True, "slurm": slurm, "variants": (f"{vendor}-gpus",)}
    with MiniCluster(cluster_root, 1, **given) as cluster:
        jobs = Jobs(cluster)
        job = jobs.submit(TELLS, "--nproc-per-node=gpu", 1, ("--gpus-per-node=3",))
        job.ends("COMPLETED", 0)
        assert [one[name] for one in told(job)] == ["0,1,2"] * 3
        assert "CUDA_VISIBLE_DEVICES" not in told(job)[0]
        jobs.check()


def test_runs_side_by_side_keep_the_devices_that_the_user_gave_them(varied):
    lead = """for half in 0,1 3,2; do
    WHICH=$half- CUDA_VISIBLE_DEVICES=$half nvrx-run --srun-arg=--overlap worker.py &
done
wait
export CUDA_VISIBLE_DEVICES=2,7"""
    job = varied.submit(TELLS, "", 1, ("--gpus-per-node=4",), lead=lead)
    job.ends("FAILED", 2)
    assert [(one["CUDA_VISIBLE_DEVICES"], one["RANK"]) for one in told(job)] == [
        ("0,1", "0"), ("0,1", "1"), ("3,2", "0"), ("3,2", "1"),
    ]  # fmt: skip
    assert "CUDA_VISIBLE_DEVICES=2,7" in job.said() and "0,1,2,3" in job.said()


def test_ranks_have_the_environment_of_the_batch_script(varied):
    """Of sbatch --export only the script has a part."""
    job = varied.new(TELLS)
    path = varied.environment(job)[0].removeprefix("--export=ALL,")
    script = "#!/bin/bash\nexport HOME=/there MINE=yes\nexec nvrx-run worker.py\n"
    job.job_id = varied.cluster.submit(script, "--nodes=2", f"--export={path}", f"--chdir={job.directory}")
    job.ends("COMPLETED", 0)
    assert [(one["HOME"], one["MINE"]) for one in told(job)] == [("/there", "yes")] * 2


@pytest.mark.fast
@pytest.mark.parametrize(
    ("env", "nodes", "own"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, ""),  # in a cgroup
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2, ""),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 2, "CUDA_VISIBLE_DEVICES=1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, "CUDA_VISIBLE_DEVICES="),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1, GPU-2"}, 1, "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 2, ""),  # Slurm's, and other ones on the other node
        ({"ROCR_VISIBLE_DEVICES": "5", "ZE_AFFINITY_MASK": "4"}, 2, "ROCR_VISIBLE_DEVICES=5 ZE_AFFINITY_MASK=4"),
        ({"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": ""}, 2, ""),  # of a login node
    ],
)
def test_lists_that_are_the_users(env, nodes, own):
    assert share.own_devices({"SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "4,5", **env}, nodes) == own
