"""The launch scripts of the migration page: each line "after" runs, below the header that scripts of its kind have.

Images and conda are stand-ins on PATH that run what follows.
"""

import re
from pathlib import Path

import pytest
from nvrx_job import nvrx_submit
from stage import free_port
from waits import WAIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d")]

PAGE = Path(__file__).parents[2] / "docs/how-to/migrate-from-torchrun.md"
ROWS = dict(re.findall(r"^\| (.+?) \| `.+?` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE))
SHAPES = {name: line for name, line in ROWS.items() if re.search(r"nvrx-run|ft_launcher", line)}
PER_TASK = ("--ntasks-per-node=2", "--gpus-per-task=1", "--cpus-per-task=1")
HEADERS = {
    "NERSC, a task per GPU": (*PER_TASK, "--gpu-bind=none"),
    "ranks by SLURM_PROCID": PER_TASK,
    "LUMI": ("--ntasks-per-node=2", "--gpus-per-node=2", "--mem-per-cpu=1000"),
    "accelerate": ("--ntasks-per-node=1", "--gres=gpu:a100:2"),
    "resubmits itself": ("--gpus-per-node=2", "--requeue"),
}
IMAGE = '#!/bin/sh\nwhile [ "$1" != image ]; do shift; done; shift\nexport IN_IMAGE=yes\nexec "$@"\n'
STAND_INS = {
    "singularity": IMAGE,
    "apptainer": IMAGE,
    # a plugin takes these options
    "srun": """#!/bin/bash
for word; do
    case $word in --container-image=*|--environment=*) export IN_IMAGE=yes;; *) words+=("$word");; esac
done
exec "$(PATH=${PATH#*:} command -v srun)" "${words[@]}"
""",
    "conda": '#!/bin/sh\n[ "$1 $2" = "activate ds" ]\n',
}
TRAINS = "mark(f\"of-{os.environ['WORLD_SIZE']}-{os.environ.get('IN_IMAGE', '-')}\")\n"
USUAL = {"torchtitan", "LUMI", "NERSC, a task per GPU", "pyxis"}


@pytest.mark.parametrize(
    "shape", [name if name in USUAL else pytest.param(name, marks=pytest.mark.matrix) for name in SHAPES]
)
def test_the_line_after_trains_on_all_of_the_job(varied, shape):
    line, cluster = SHAPES[shape], varied.cluster
    job = varied.new(TRAINS)
    worker = (job.directory / "worker.py").read_text()
    for name in ("train.py", "pretrain_gpt.py", "torchtitan/train.py"):
        (job.directory / name).parent.mkdir(exist_ok=True)
        (job.directory / name).write_text(worker)
    tools = job.directory / "tools"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (environment,) = varied.environment(job)
    header = ("--nodes=2", "--no-kill", *HEADERS.get(shape, ("--gpus-per-node=2",)))
    environment = environment.replace("PATH=", f"PATH={tools}:", 1) + ",SIF=image,IMAGE=image,CONFIG=c.toml"
    if line.startswith(("salloc", "sbatch")):
        # from another job, which stands for a login node
        asks = "--gpus-per-node=2 --no-kill --mem=1000"
        line = line.replace("-N 2", f"-N 2 {asks} --wait" if line.startswith("sbatch") else f"-N 2 {asks}")
        line = f"for name in ${{!SLURM*}}; do [ $name = SLURM_CONF ] || unset $name; done\n{line}"
        header = ("--nodes=1", "--mem=1000")
    job.job_id = cluster.submit(f"#!/bin/bash\n{line}\n", *header, environment, f"--chdir={job.directory}")
    job.ends("COMPLETED", 0)
    image = "yes" if shape in ("LUMI", "CSCS", "apptainer", "pyxis") else "-"
    assert len(job.marks(f"of-4-{image}")) == 4, job.said()


# torchrun's flags may stay
AS_BEFORE = """#!/bin/bash
rank=0
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    flags="--nnodes=2 --node-rank=$rank --master-addr=localhost --master-port={port}"
    srun -N1 -n1 -w $node --gpus-per-node=2 nvrx-run $flags worker.py &
    rank=$((rank + 1))
done
wait
"""
SWEEP = """#!/bin/bash
nvrx-run --nnodes=$SLURM_NNODES --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=localhost:{port} worker.py
"""


@pytest.mark.parametrize("script, more", [(AS_BEFORE, ()), (SWEEP, ("--array=3",))], ids=["a step per node", "a sweep"])
def test_a_script_with_the_flags_of_torchrun(varied, script, more):
    job = varied.new(TRAINS)
    shape = ("--nodes=2", "--gpus-per-node=2", "--no-kill", *more)
    text = script.format(port=free_port())
    job.job_id = varied.cluster.submit(text, *shape, *varied.environment(job), f"--chdir={job.directory}")
    job.ends("COMPLETED", 0)
    assert len(job.marks("of-4--")) == 4, job.said()


def test_runs_on_nodes_of_their_own(varied):
    """Side by side: each waits for the other one's ranks."""
    (step,) = re.findall(r"`(srun .*) -N2 --ntasks-per-node=1 nvrx-run train.py &`", PAGE.read_text())
    meet = "open('meet', sys.argv[1]).close()\n"  # of a FIFO: waits for the other one
    job = varied.new(TRAINS + meet)
    one = f"{step} -N1 --ntasks-per-node=1 nvrx-run --nproc-per-node=1 worker.py"
    text = f"#!/bin/bash\nmkfifo meet\n{one} r & first=$!\n{one} w & second=$!\nwait $first && wait $second\n"
    job.job_id = varied.cluster.submit(text, "--nodes=2", *varied.environment(job), f"--chdir={job.directory}")
    job.ends("COMPLETED", 0)
    assert len({mark.node for mark in job.marks("of-1--")}) == 2, job.said()


def test_the_page_has_sixteen_of_them():
    assert len(SHAPES) == 16 and HEADERS.keys() <= SHAPES.keys() and SHAPES.keys() >= USUAL


def test_a_heterogeneous_job_is_told_what_it_does_not_use(varied):
    job = varied.new(TRAINS)
    header = "#SBATCH --nodes=2 --mem=500\n#SBATCH hetjob\n#SBATCH --nodes=1 --mem=500\n"
    script = f"#!/bin/bash\n{header}nvrx-run worker.py\n"
    job.job_id = varied.cluster.submit(script, *varied.environment(job), f"--chdir={job.directory}")
    job.ends("COMPLETED", 0)
    assert len(job.marks("of-2--")) == 2 and "first of its 2 components, 2 nodes" in job.said(), job.said()


def test_what_sbatch_takes_nvrx_submit_takes(varied):
    flags = ("--job-name", "my run", "--gpus-per-node", "a100:2", "--log-dir", "my logs")
    job, _ = nvrx_submit(varied, TRAINS, *flags)
    assert varied.cluster.wait_job(job.job_id, WAIT_S).state == "COMPLETED"
    assert len(job.marks("of-2--")) == 2 and varied.cluster.job(job.job_id)["JobName"].startswith("my")
