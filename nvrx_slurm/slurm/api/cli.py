"""The one interface to Slurm, by Slurm's command line tools. `by_pyslurm` has another backend for a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.facts import JobFacts, NodeFacts, NotKnown, SlurmError, StepFacts
from nvrx_slurm.slurm.api.tools import Tools

_SUBMIT_S = 60.0  # a job_submit plugin of the site may take its time


class Slurm:
    """Questions to Slurm and changes, each one call to slurmctld at most, bounded, and never two at a time.

    All methods block; never call one on an event loop. All raise SlurmError: NoAnswer when slurmctld is away or slow,
    NotKnown for a job, step or node that is not there, NotAllowed where this user may not.
    """

    name = "cli"  # or "pyslurm"

    def __init__(self, tools: Tools | None = None) -> None:
        self.tools = tools or Tools()

    # --- questions --------------------------------------------------------------------------------------------

    def job(self, job_id: int) -> JobFacts:
        """One job; of an array's id the task that has it."""
        return text.job(self._scontrol("show", "job", str(job_id), "-o"), job_id)

    def preempted(self, job_id: int) -> bool:
        """Whether Slurm takes the nodes of this life of the job away. pyslurm does not know it."""
        return Slurm.job(self, job_id).preempted

    def requeues(self, job_id: int) -> bool:
        """Whether this job waits again where Slurm takes its nodes away: as its partition or its QOS says."""
        job, config = Slurm.job(self, job_id), self.config()
        told, otherwise = "", ""
        if config.get("PreemptType") != "preempt/qos":
            told = self._scontrol("show", "partition", job.partition, "-o")
        else:
            otherwise = config.get("PreemptMode", "")
            if job.qos:
                told = self._scontrol("show", "assoc_mgr", f"qos={job.qos}", "flags=qos", "-o")
        return job.requeue and bool(job.batch_host) and text.requeues(told, otherwise)

    def steps(self, job_id: int) -> list[StepFacts]:
        """The steps of a job that run now; [] when none does."""
        try:
            told = self.tools.run("squeue", "--steps", "-h", "-j", str(job_id), "-o", "%i|%j")
        except NotKnown:
            return []
        return text.steps(told)

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeFacts]:
        """These nodes, or all, in one call. A name that Slurm does not know raises NotKnown."""
        wanted = [text.node_name(name) for name in names]
        found = self._nodes(wanted)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise NotKnown(f"Slurm: its answer does not name node {missing[0]}")
        return found

    def _nodes(self, wanted: list[str]) -> dict[str, NodeFacts]:
        which = [",".join(wanted)] if wanted else []
        told = self._scontrol("show", "node", *which, "-o")
        return text.nodes(told)

    def config(self) -> dict[str, str]:
        """slurm.conf as slurmctld runs it, by name; "(null)" is "". Values of Prolog[0], Prolog[1] are joined."""
        found = text.config(self._scontrol("show", "config"))
        if "SLURM_VERSION" not in found:
            raise SlurmError("Slurm's answer about its configuration has no field SLURM_VERSION")
        return found

    # --- changes ----------------------------------------------------------------------------------------------

    def signal(self, step_id: str, signum: int) -> None:
        """Send `signum`, and nothing else, to the tasks of one step ("7.0")."""
        self.tools.run("scancel", f"--signal={signum}", step_id)

    def cancel(self, job_id: int) -> None:
        """scancel the job; of an array's id all its tasks. One that has ended, or is not known, is no error."""
        with suppress(NotKnown):
            self.tools.run("scancel", str(job_id))

    def requeue(self, job_id: int) -> None:
        """End the job and put it back into the queue."""
        self._scontrol("requeue", str(job_id))

    def update_job(self, job_id: int, change: str) -> None:
        """Change a field of a job: "ExcNodeList=...", as sbatch --exclude, while it waits, or "Comment=..."."""
        self._scontrol("update", f"JobId={job_id}", change)

    def update_node(self, node: str, *changes: str) -> None:
        """Change fields of a node ("State=DRAIN", "Reason=..."). UNDRAIN takes off the drain only: a node that is down
        stays down. A reason alone leaves the state as it is."""
        self._scontrol("update", f"NodeName={text.node_name(node)}", *changes)

    def submit(self, script: Path, options: Sequence[str] = ()) -> int:
        """sbatch the script with `options` before it; the job's id."""
        said = self.tools.run("sbatch", "--parsable", *options, str(script), timeout_s=_SUBMIT_S)
        job_id = said.strip().rpartition("\n")[2].partition(";")[0]
        if not (job_id.isascii() and job_id.isdigit()):
            raise SlurmError(f"sbatch tells no job id: {said[:80]!r}")
        return int(job_id)

    def complete(self, job_id: int, code: int) -> None:
        """End a job that has lost its batch host, with exit code `code` (0..255). Only libslurm can, no tool."""
        from nvrx_slurm.slurm.api import completion  # loads ctypes, for this only

        config = self.config()
        with self.tools.turn.take(completion.TIMEOUT_S):
            completion.run(job_id, code, config["SLURM_VERSION"], config.get("PluginDir", ""))

    def close(self) -> None:
        """End what the backend has started."""

    def _scontrol(self, *words: str) -> str:
        return self.tools.run("scontrol", *words)
