"""The first part of `nvrx doctor`: what a job needs on this node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from nvrx_slurm.cli.doctor_site import FAIL, OK, WARN, Line, Site
from nvrx_slurm.errors import NvrxError

STOP_TIMEOUT_S = 15.0  # default of --workers-stop-timeout


def _slurm(site: Site) -> Iterator[Line]:
    if not site.slurm:
        yield Line("slurm", FAIL, f"scontrol does not answer: {site.problem}", "run this on a node of the cluster")
        return
    yield Line("slurm", OK, f"Slurm {site.slurm.get('SLURM_VERSION', 'of unknown version')}")
    kill_wait_s = site.seconds("KillWait", 30)
    text = f"{kill_wait_s:g} s from SIGTERM to SIGKILL at scancel and the time limit"
    if kill_wait_s < STOP_TIMEOUT_S:
        advice = f"slurm.conf: KillWait=30; until then --workers-stop-timeout below {kill_wait_s:g}"
        yield Line("kill-wait", WARN, text, advice)
    else:
        yield Line("kill-wait", OK, text)
    if site.slurm.get("KillOnBadExit") == "1":
        text = "KillOnBadExit=1: a step ends with its first task that fails"
        advice = "nvrx-run in a batch script overrides it; with srun: srun --no-kill --kill-on-bad-exit=0 nvrx-run"
        yield Line("kill-on-bad-exit", WARN, text, advice)
    else:
        text = "a step outlives a task that fails; with sbatch --no-kill and srun --no-kill also a node"
        yield Line("kill-on-bad-exit", OK, text)


def _tools(site: Site) -> Iterator[Line]:
    from nvrx_slurm.slurm.munge import Munge

    try:
        munge = Munge.find(os.environ.get("NVRX_MUNGE_SOCKET"))
        if munge is None:
            yield Line("munge", WARN, "no libmunge", "install munge; `srun nvrx-run` without a batch script needs it")
        else:
            munge.open(munge.seal(b"doctor"))
            yield Line("munge", OK, "munged answers")
    except NvrxError as error:
        yield Line("munge", FAIL, str(error), "start munged")
    numactl = shutil.which("numactl")
    missing = Line("numactl", WARN, "not found", "install numactl; binding workers to NUMA nodes needs it")
    yield Line("numactl", OK, numactl) if numactl else missing


LOOKS = (_slurm, _tools)
