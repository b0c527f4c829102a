"""What a file of --ft-cycle-info-dir says: NVRxCycleInfo as JSON, with all fields. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.declared import Record
from nvrx_slurm.types import Node


class CycleFiles(Record):
    """Where the files are."""

    directory: str
    job: str
    attempt: int  # Slurm's restart count
    prefix: str = ""  # of the merged logs; "" = none

    def name(self, cycle: int) -> str:
        """The file name of one cycle."""
        return f"cycle_info.{self.job}.{self.attempt}.{cycle}"

    @property
    def current(self) -> str:
        """Path of the link to the newest file."""
        return f"{self.directory}/cycle_info.{self.job}.current"


def document(
    files: CycleFiles, assignment: Assignment, nodes: Iterable[Node], log_file: str
) -> dict[str, object]:
    """The content for the cycle of `assignment`, without times. `nodes`: all that the coordinator knows."""
    assert assignment.shared is not None
    by_id = {node.node_id: node for node in nodes}
    slots = [slot for _, slot in sorted(assignment.slots.items())]
    active = {slot.node_id for slot in slots}
    return {
        "job_id": files.job,
        "attempt_index": files.attempt,
        "cycle_number": assignment.shared.cycle,
        "cycle_start_time": "",
        "cycle_end_time": "",
        "cycle_log_file": log_file,
        "active_nodes": ",".join(
            by_id[slot.node_id].host for slot in slots if slot.node_id in by_id
        ),
        "standby_nodes": ",".join(
            node.host for node in by_id.values() if node.node_id not in active
        ),
        "generation": str(assignment.shared.term),
        "active_ranks": ",".join(
            f"{slot.first_rank}-{slot.first_rank + slot.nproc - 1}" for slot in slots
        ),
    }
