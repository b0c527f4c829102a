"""What sends no event, such as a state in /proc, is looked at until it is so."""

import select
import time

WAIT_S = 150.0  # for anything that must happen: a bound for defects, not a measure of speed


def until(condition, what, wait_s=WAIT_S):
    """Return once `condition` holds. A pause between two looks leaves the core to what is tested."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        select.select([], [], [], 0.005)
