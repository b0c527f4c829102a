"""Slurm's blocks of nodes (topology/block, from 23.11), as `scontrol show topology` prints them."""

from __future__ import annotations

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import control, nodelist


def blocks() -> dict[str, str]:
    """The block of each node; {} where Slurm has none, or does not answer within 10 s."""
    return parse_blocks(control._ask(["scontrol", "show", "topology"]) or "")


def parse_blocks(text: str) -> dict[str, str]:
    """From lines such as "BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4". Others say nothing here."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        fields = control.parse_fields(line)
        try:
            names = nodelist.expand(fields.get("Nodes", ""))
        except UsageError:
            continue
        for name in names if "BlockName" in fields else ():
            found.setdefault(name, fields["BlockName"])
    return found
