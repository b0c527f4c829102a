"""The hooks under a real Slurm: what it makes of our reasons and exit codes, and with which environment it calls us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dgx
import pytest
from minicluster import MiniCluster
from nvrx_job import PATIENCE_S, start_again, wait_in

from nvrx_slurm.health.hooks import drains as drain
from nvrx_slurm.slurm.drain import Note, parse_note

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's hooks run as root")]

REPO = Path(__file__).resolve().parents[2]
# Of the site: fails on the nodes for which there is a file FLAG-NODE.
OWN = """#!/bin/sh
if [ -e {root}/$1-hangs-$SLURMD_NODENAME ]; then exec /bin/sleep 600; fi
if [ -e {root}/$1-$SLURMD_NODENAME ]; then echo "the $1 is broken"; exit 1; fi
"""


class Cluster:
    """Three nodes with all our hooks; `break_`ing a check `fan` is noticed by prolog and epilog, `disk` by the
    periodic hook."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.facts = root / "facts"
        self.facts.mkdir()
        self._install()
        extra = (
            f"Prolog={root}/hooks/prolog",
            f"Epilog={root}/hooks/epilog",
            f"HealthCheckProgram={root}/hooks/healthcheck",
            "HealthCheckInterval=3",
            "PrologFlags=Alloc,DeferBatch",
            "PrologEpilogTimeout=60",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,nohold_on_prolog_fail",
        )
        self.slurm = MiniCluster(root / "mc", nodes=3, kill_wait_s=5, die_with_owner=True, extra=extra)

    def _install(self) -> None:
        root = self.root
        shutil.copytree(REPO / "prolog", root / "hooks")
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
        )

    def break_(self, what: str, node: str) -> None:
        (self.facts / f"{what}-{node}").touch()

    def mend(self) -> None:
        for file in self.facts.iterdir():
            file.unlink()

    def note(self, node: str) -> Note:
        return parse_note(self.slurm.run("scontrol", "show", "node", node, "-o"))

    def log(self) -> list[str]:
        file = self.root / "log"
        return file.read_text().splitlines() if file.exists() else []

    def wait_log(self, words: str, after: int = 0) -> str:
        """Wait until a hook logs a line with `words`, after `after` lines; returns it."""

        def found() -> list[str]:
            return [line for line in self.log()[after:] if words in line]

        came = wait_in(self.root, lambda: bool(found()), PATIENCE_S)
        assert came, f"never logged: {words!r}, but\n" + "\n".join(line for line in self.log() if " job " in line)
        return found()[0]

    def wait_round(self, node: str) -> None:
        """Wait until the periodic hook has begun and ended on `node` from now on."""
        for _ in range(2):
            self.wait_log(f"nvrx-periodic: {node}: pass", len(self.log()))


@pytest.fixture(scope="module")
def hooked(needs_slurm: None) -> Iterator[Cluster]:
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    cluster = Cluster(root)
    cluster.slurm.up()
    try:
        yield cluster
    finally:
        stray = cluster.slurm.down()
    assert stray == [] and cluster.slurm.scan() == []
    shutil.rmtree(root)


@pytest.fixture
def cluster(hooked: Cluster) -> Iterator[Cluster]:
    """Healthy and idle."""
    hooked.mend()
    hooked.slurm.reset()
    yield hooked
    hooked.mend()


def test_the_doctor_finds_them_in_order(cluster: Cluster) -> None:
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "doctor", "--json"]
    env = {**os.environ, **cluster.slurm.env()}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert lines["slurm"]["text"].startswith("Slurm 2")
    for name in ("prolog", "epilog", "healthcheck", "prolog-flags", "requeue", "python", "site-file", "munge"):
        assert lines[name]["status"] == "ok", lines[name]


OK = "#!/bin/sh\necho ran on $SLURMD_NODENAME\n"


def test_a_prolog_that_fails_drains_that_node_and_the_job_runs_elsewhere(cluster: Cluster) -> None:
    cluster.break_("fan", "n1")
    job = cluster.slurm.submit(OK, "--requeue", "--nodes=1")
    cluster.wait_log(f"n1 job {job}: drained")
    start_again(cluster.slurm, job)
    assert cluster.slurm.wait_job(job, PATIENCE_S).state == "COMPLETED"
    assert cluster.slurm.output(job) in ("ran on n2\n", "ran on n3\n")
    assert cluster.slurm.job(job)["Restarts"] == "1"
    note = cluster.note("n1")
    assert "DRAIN" in note.states and (note.reason, note.who) == ("nvrx:fan:the fan is broken", "root")
    for other in ("n2", "n3"):
        assert cluster.note(other) == Note(frozenset({"IDLE"}), "", "")


def test_only_our_drain_is_taken_back(cluster: Cluster) -> None:
    """n1 is drained by us, n2 by a person, n3 by a person who wrote over our reason."""
    before = len(cluster.log())
    for node in ("n1", "n3"):
        cluster.break_("disk", node)
        cluster.wait_log(f"nvrx-periodic: {node}: drained: nvrx:disk:the disk is broken", before)
    cluster.slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a new fan on Monday")
    cluster.slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=nvrx:disk: a new one on Monday")
    cluster.slurm.run("scontrol", "update", "NodeName=n3", "Reason=a new disk on Monday")
    assert cluster.note("n1").reason == "nvrx:disk:the disk is broken"
    cluster.mend()
    cluster.wait_log("nvrx-periodic: n1: taken back: disk passes again", before)
    for node in ("n2", "n3"):
        cluster.wait_round(node)
    assert cluster.note("n1") == Note(frozenset({"IDLE"}), "", "")
    assert cluster.note("n2")[:2] == ({"IDLE", "DRAIN"}, "a new fan on Monday")
    assert cluster.note("n3")[:2] == ({"IDLE", "DRAIN"}, "a new disk on Monday")


def test_a_check_that_hangs_holds_the_prolog_up_for_its_budget_only(cluster: Cluster) -> None:
    cluster.break_("fan-hangs", "n1")
    job = cluster.slurm.submit(OK, "--requeue", "--nodes=1")
    line = cluster.wait_log("fan: unknown: timed out")
    assert "nvrx-prolog: n1 job" in line
    cluster.wait_log(f"nvrx-prolog: n1 job {job}: drained: nvrx:fan:timed out")
    start_again(cluster.slurm, job)
    assert cluster.slurm.wait_job(job, PATIENCE_S).state == "COMPLETED"
    assert "Prolog hung" not in (cluster.slurm.root / "log" / "slurmd-n1.log").read_text()
    why = drain.parse(cluster.note("n1").reason)
    assert why is not None and why.checks == ("fan",)


def test_a_job_may_skip_what_the_site_allows(cluster: Cluster) -> None:
    """The hooks get the job's comment without asking slurmctld."""
    cluster.break_("fan", "n1")
    job = cluster.slurm.submit(OK, "--nodes=1", "--nodelist=n1", "--comment=nvrx:skip=fan,disk")
    assert cluster.wait_log(f"nvrx-prolog: n1 job {job}: nvrx:skip=fan,disk").endswith(" skips fan")
    assert cluster.slurm.wait_job(job, PATIENCE_S).state == "COMPLETED"
    assert cluster.slurm.output(job) == "ran on n1\n"


def test_the_epilog_looks_after_a_failure_and_not_after_success(cluster: Cluster) -> None:
    for code in (0, 3):
        job = cluster.slurm.submit(f"#!/bin/sh\n: >{cluster.facts}/fan-n1\nexit {code}\n", "--nodes=1")
        cluster.slurm.wait_job(job, PATIENCE_S)
        if code:
            cluster.wait_log(f"nvrx-epilog: n1 job {job}: drained: nvrx:fan:the fan is broken")
        else:
            cluster.wait_log(f"nvrx-epilog: n1 job {job}: pass: 1 checks")  # no GPU process is left over
        cluster.mend()
        assert ("DRAIN" in cluster.note("n1").states) == bool(code)
