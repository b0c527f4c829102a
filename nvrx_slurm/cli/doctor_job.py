"""The first part of `nvrx doctor`: what a job needs on this node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from nvrx_slurm.cli.doctor_site import FAIL, OK, WARN, Line, Site, judged
from nvrx_slurm.errors import NvrxError

STOP_TIMEOUT_S = 15.0  # default of --workers-stop-timeout


def _slurm(site: Site) -> Iterator[Line]:
    if not site.slurm:
        yield Line("slurm", FAIL, f"scontrol does not answer: {site.problem}", "run this on a node of the cluster")
        return
    yield Line("slurm", OK, f"Slurm {site.slurm.get('SLURM_VERSION', 'of unknown version')}")
    kill_wait_s = site.seconds("KillWait", 30)
    text = f"{kill_wait_s:g} s from SIGTERM to SIGKILL at scancel and the time limit"
    advice = f"slurm.conf: KillWait=30; until then --workers-stop-timeout below {kill_wait_s:g}"
    yield judged("kill-wait", text, (kill_wait_s < STOP_TIMEOUT_S, WARN, text, advice))
    text = "KillOnBadExit=1: a step ends with its first task that fails"
    advice = "nvrx-run in a batch script overrides it; with srun: srun --no-kill --kill-on-bad-exit=0 nvrx-run"
    good = "a step outlives a task that fails; with sbatch --no-kill and srun --no-kill also a node"
    yield judged("kill-on-bad-exit", good, (site.slurm.get("KillOnBadExit") == "1", WARN, text, advice))


def _tools(site: Site) -> Iterator[Line]:
    from nvrx_slurm.slurm import conf
    from nvrx_slurm.slurm.munge import Munge

    needed = "install munge; `srun nvrx-run` without a batch script needs it"
    try:
        munge = Munge.find(conf.munge_socket(os.environ))
        if munge is not None:
            munge.open(munge.seal(b"doctor"))
        yield judged("munge", "munged answers", (munge is None, WARN, "no libmunge", needed))
    except NvrxError as error:
        yield Line("munge", FAIL, str(error), "start munged")
    numactl = shutil.which("numactl") or ""
    needed = "install numactl; binding workers to NUMA nodes needs it"
    yield judged("numactl", numactl, (not numactl, WARN, "not found", needed))


LOOKS = (_slurm, _tools)
