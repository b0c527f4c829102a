"""The srun line that starts one agent per node. Pure: `--dry-run` prints exactly what would be run."""

from __future__ import annotations

from collections.abc import Sequence

NODE_LOG = "agents/agent_%t.log"  # below the run directory; %t is the task, here: the node
_SURVIVAL = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none")


def srun_argv(nodes: int, cpus_per_task: int, output: str, extra: Sequence[str], command: Sequence[str]) -> list[str]:
    """Command line of the step: `nodes` >= 1 agents; `cpus_per_task` 0 = as the allocation has it; `extra`: the user's.

    --no-kill: a lost node must not end the step. --kill-on-bad-exit=0, --wait=0: agents decide about restarts and the
    end, srun does not. --mpi=none: no PMI. Output goes to files, because tasks whose output goes through srun die with
    srun's host. There is no input. --cpus-per-task: srun of Slurm 22.05 to 23.02 does not take it from the job.
    """
    shape = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    files = ["--input=none", f"--output={output}", f"--error={output}", "--open-mode=append"]
    cpus = [f"--cpus-per-task={cpus_per_task}"] if cpus_per_task > 0 else []
    return ["srun", *_SURVIVAL, *shape, *files, *cpus, *extra, *command]
