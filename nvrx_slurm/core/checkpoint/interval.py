"""How often to save. Pure, and quick to import: ranks do. Times in seconds."""

from __future__ import annotations

from math import sqrt

# Llama 3 (arXiv 2407.21783, table 5): 2,048 nodes had 419 unexpected interruptions in 54 days.
_NODE_MTBF_S = 54 * 86400.0 * 2048 / 419
SAVE_S = 60.0  # that a save takes, as long as none was seen


def mtbf_s(nodes: int, elapsed_s: float, faults: int) -> float:
    """Mean time between faults of a job that has run on `nodes` (>= 1) nodes: what was measured, and one fault at the
    rate of Llama 3's nodes, which counts as long as little was measured."""
    return (_NODE_MTBF_S / nodes + max(0.0, elapsed_s)) / (1 + faults)


def best_interval_s(save_s: float, between_faults_s: float) -> float:
    """From one save to the next, after Young (1974) and Daly (2006)."""
    return sqrt(2 * save_s * between_faults_s)
