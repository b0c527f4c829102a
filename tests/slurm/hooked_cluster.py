"""A cluster whose nodes run all our hooks, with checks of the site that a test breaks and mends."""

import json
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import dgx
import slurm_builds
from minicluster import MiniCluster
from nvrx_job import start_again, wait_in
from waits import WAIT_S

from nvrx_slurm.slurm.api import text

REPO = Path(__file__).resolve().parents[2]
# Of the site: fails on the nodes for which there is a file FLAG-NODE.
OWN = """#!/bin/sh
if [ -e {root}/$1-hangs-$SLURMD_NODENAME ]; then exec /bin/sleep 600; fi
if [ -e {root}/$1-$SLURMD_NODENAME ]; then echo "the $1 is broken"; exit 1; fi
"""


@contextmanager
def running(slurm="", prolog_only=False):
    """Such a cluster of this version, up; nothing of it is left afterwards."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    cluster = HookedCluster(root, slurm, prolog_only)
    cluster.slurm.up()
    try:
        yield cluster
    finally:
        stray = cluster.slurm.down()
    assert stray == [] and cluster.slurm.scan() == []
    shutil.rmtree(root)


class HookedCluster:
    """Three nodes with all our hooks; `break_`ing a check `fan` is noticed by prolog and epilog, `disk` by the
    periodic hook."""

    def __init__(self, root, slurm, prolog_only):
        self.root = root
        self.facts = root / "facts"
        self.facts.mkdir()
        self._install(slurm)
        extra = (
            f"Prolog={root}/hooks/prolog",
            "PrologFlags=Alloc,DeferBatch",
            "PrologEpilogTimeout=60",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,nohold_on_prolog_fail",
        )
        others = (
            f"Epilog={root}/hooks/epilog",
            f"HealthCheckProgram={root}/hooks/healthcheck",
            "HealthCheckInterval=3",
        )
        extra += () if prolog_only else others
        self.slurm = MiniCluster(root / "mc", nodes=3, kill_wait_s=5, die_with_owner=True, extra=extra, slurm=slurm)

    def _install(self, slurm):
        root = self.root
        shutil.copytree(REPO / "prolog", root / "hooks")
        hook = root / "hooks" / "healthcheck"  # it is idle until a test makes this file: a round costs a second
        hook.write_text(hook.read_text().replace("\nhere=", f"\n[ -e {root}/periodic ] || exit 0\nhere="))
        dgx.build(root / "dgx")
        (root / "dgx" / "run").mkdir(exist_ok=True)
        script = root / "own"
        script.write_text(OWN.format(root=self.facts))
        script.chmod(0o755)
        own = [
            {"name": "fan", "run": [str(script), "fan"], "when": ["prolog", "epilog"], "budget": 2,
             "on_unknown": "drain"},
            {"name": "disk", "run": [str(script), "disk"], "when": ["periodic"]},
        ]  # fmt: skip
        hooks = {"allow_skip": ["fan"]}
        (root / "health.yaml").write_text(json.dumps({"own": own, "hooks": hooks}))
        (root / "hooks" / "hooks.conf").write_text(
            f"PYTHON={sys.executable}\nPACKAGE={REPO}\nCONFIG={root}/health.yaml\nLOG={root}/log\n"
            f"SYSROOT={root}/dgx\nSLURM_CONF={root}/mc/slurm.conf\n"
            + "".join(f"SCONTROL={folder}/scontrol\n" for folder in slurm_builds.bins(slurm)[:1])
        )

    def break_(self, what, node):
        (self.facts / f"{what}-{node}").touch()

    def mend(self):
        for file in self.facts.iterdir():
            file.unlink()

    def note(self, node):
        return text.nodes(self.slurm.run("scontrol", "show", "node", node, "-o"))[node]

    def log(self):
        file = self.root / "log"
        return file.read_text().splitlines() if file.exists() else []

    def wait_log(self, words, after=0):
        """Wait until a hook logs a line with `words`, after `after` lines; returns it."""

        def found():
            return [line for line in self.log()[after:] if words in line]

        came = wait_in(self.root, lambda: bool(found()), WAIT_S)
        assert came, f"never logged: {words!r}, but\n" + "\n".join(line for line in self.log() if " job " in line)
        return found()[0]

    def wait_rounds(self, *nodes):
        """Wait until the periodic hook has begun and ended on these nodes from now on."""
        for _ in range(2):
            after = len(self.log())
            for node in nodes:
                self.wait_log(f"nvrx-periodic: {node}: pass", after)

    def assert_prolog_drains(self, node):
        """A job that would run on `node`, whose fan is broken, drains it and runs on another one."""
        self.break_("fan", node)
        job = self.slurm.submit("#!/bin/sh\necho ran on $SLURMD_NODENAME\n", "--requeue", "--nodes=1")
        self.wait_log(f"{node} job {job}: drained")
        start_again(self.slurm, job)
        assert self.slurm.wait_job(job, WAIT_S).state == "COMPLETED"
        assert self.slurm.output(job).startswith("ran on n") and node not in self.slurm.output(job)
        assert self.slurm.job(job)["Restarts"] == "1"
        note = self.note(node)
        assert "DRAIN" in note.states and (note.reason, note.reason_by) == ("nvrx:fan:the fan is broken", "root")
