"""The backend by Slurm's command line tools, and what both backends do by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.slurm.api import completion, text
from nvrx_slurm.slurm.api.facts import JobFacts, NodeFacts, NotKnown, SlurmError, StepFacts
from nvrx_slurm.slurm.api.tools import Tools

_SUBMIT_S = 60.0  # a job_submit plugin of the site may take its time


class CommandLine:
    """See interface.Slurm."""

    name = "cli"

    def __init__(self, tools: Tools | None = None) -> None:
        self.tools = tools or Tools()

    def job(self, job_id: int) -> JobFacts:
        """By scontrol show job."""
        return text.job(self._scontrol("show", "job", str(job_id), "-o"), job_id)

    def steps(self, job_id: int) -> list[StepFacts]:
        """By squeue --steps."""
        try:
            return text.steps(self.tools.run("squeue", "--steps", "-h", "-j", str(job_id), "-o", "%i|%N|%j"))
        except NotKnown:
            return []

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeFacts]:
        """By scontrol show node."""
        wanted = [text.node_name(name) for name in names]
        found = text.nodes(self._scontrol("show", "node", *([",".join(wanted)] if wanted else []), "-o"))
        missing = [name for name in wanted if name not in found]
        if missing:
            raise NotKnown(f"Slurm: its answer does not name node {missing[0]}")
        return found

    def blocks(self) -> dict[str, str]:
        """By scontrol show topology, for both backends."""
        return text.blocks(self._scontrol("show", "topology"))

    def config(self) -> dict[str, str]:
        """By scontrol show config."""
        found = text.config(self._scontrol("show", "config"))
        if "SLURM_VERSION" not in found:
            raise SlurmError("Slurm's answer about its configuration has no field SLURM_VERSION")
        return found

    def signal(self, job_id: int, signum: int, step: str = "") -> None:
        """By scancel --signal: unlike a signal to srun, this delivers just the signal."""
        self.tools.run("scancel", f"--signal={signum}", step or str(job_id))

    def cancel(self, job_id: int) -> None:
        """By scancel."""
        with suppress(NotKnown):  # it has ended
            self.tools.run("scancel", str(job_id))

    def requeue(self, job_id: int) -> None:
        """By scontrol requeue."""
        self._scontrol("requeue", str(job_id))

    def exclude(self, job_id: int, nodes: Sequence[str]) -> None:
        """By scontrol update."""
        self._scontrol("update", f"JobId={job_id}", f"ExcNodeList={','.join(map(text.node_name, nodes))}")

    def drain(self, node: str, reason: str) -> None:
        """By scontrol update."""
        self._scontrol("update", f"NodeName={text.node_name(node)}", "State=DRAIN", f"Reason={reason}")

    def set_reason(self, node: str, reason: str) -> None:
        """By scontrol update."""
        self._scontrol("update", f"NodeName={text.node_name(node)}", f"Reason={reason}")

    def undrain(self, node: str) -> None:
        """By scontrol update."""
        self._scontrol("update", f"NodeName={text.node_name(node)}", "State=UNDRAIN")

    def submit(self, script: Path, options: Sequence[str] = ()) -> int:
        """By sbatch, for both backends: its plugins, and options of plugins, exist only there."""
        said = self.tools.run("sbatch", "--parsable", *options, str(script), timeout_s=_SUBMIT_S)
        job_id = said.strip().rpartition("\n")[2].partition(";")[0]
        if not (job_id.isascii() and job_id.isdigit()):
            raise SlurmError(f"sbatch tells no job id: {said[:80]!r}")
        return int(job_id)

    def complete(self, job_id: int, code: int) -> None:
        """By libslurm, for both backends: no tool and not pyslurm can."""
        config = self.config()
        with self.tools.turn.take(completion.TIMEOUT_S):
            completion.run(job_id, code, config["SLURM_VERSION"], config.get("PluginDir", ""))

    def close(self) -> None:
        """Nothing is left."""

    def _scontrol(self, *words: str) -> str:
        return self.tools.run("scontrol", *words)
