"""`nvrx-run`: starts a step, is the agent of a node, or says how to submit, by the place where it was started."""

from __future__ import annotations

import os
import sys

from nvrx_slurm import compat
from nvrx_slurm.cli.options import nvrx_run_options
from nvrx_slurm.config.layers import Resolved
from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import own_step, share
from nvrx_slurm.system.limits import check_start

LOGIN_HELP = """this is a login node of a Slurm cluster, not a job. Do one of these:
  in a batch script (see sbatch_templates/):  nvrx-run ... train.py      then: sbatch script
  interactively:                              salloc -N 2 nvrx-run ... train.py
  directly:                                   srun -N 2 --ntasks-per-node=1 --no-kill nvrx-run ... train.py
  on this machine all the same:               nvrx-run --standalone ... train.py"""


def nvrx_run(resolved: Resolved, script: str, args: tuple[str, ...]) -> int:
    """Run SCRIPT on all nodes of a job and keep it running: ranks that crash or hang are restarted, lost nodes are
    replaced by hot spares.

    In a batch script or salloc shell it starts the srun step itself; inside an srun task it is that node's agent;
    without Slurm it runs on this machine, or on several by --nnodes and --rdzv-endpoint. Everything after SCRIPT is
    SCRIPT's.
    """
    from nvrx_slurm.cli.here import STEP_ENV, StartPlace, find_here, step_of

    check_start()
    if "SLURM_STEP_ID" in os.environ:
        own_step.forget_another(os.environ, own_step.find())
    config, here = resolved.config, find_here(resolved, os.environ)
    if config.launch.dry_run:
        from nvrx_slurm.cli.dry_run import dry_run

        print(dry_run(here, script, args))
        return 0
    if here.place is StartPlace.LOGIN:
        raise UsageError(LOGIN_HELP)
    if config.ft.signatures is not None:
        from nvrx_slurm.config.signatures import read_signatures
        from nvrx_slurm.core.attribution.rules import use

        use(read_signatures(config.ft.signatures))
    if here.place is StartPlace.BATCH:
        from nvrx_slurm.cli.front import run_step

        return run_step(here, script, args, sys.argv[1:])
    share.take_own_devices(os.environ)
    here = replace(here, env=dict(os.environ))
    # no process of the job inherits it; those that need it get it by a socket
    os.environ.pop(TOKEN_ENV, None)
    os.environ[STEP_ENV] = step_of(os.environ)
    if config.launch.compat:
        os.environ["PYTHONPATH"] = compat.python_path(os.environ)  # workers inherit it
    from nvrx_slurm.node.preflight import head_start

    # before the other imports, which take as long as its start
    with head_start.started(config) as ahead:
        from nvrx_slurm.cli.job import make_job
        from nvrx_slurm.cli.notes import notes
        from nvrx_slurm.node.program import run

        job = make_job(here, script, args)
        return run(job, ahead, notes(here, job))


main = nvrx_run_options(nvrx_run)

if __name__ == "__main__":
    main()
