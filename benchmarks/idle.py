"""What an agent with 8 rank monitors costs while nothing happens: memory and wake-ups. Workers are not counted."""

import contextlib
import time

from benchmarks import procfs
from benchmarks.figures import Figure, Launchers, in_turns
from benchmarks.harness import Job

_NPROC = 8
_SETTLE_S = 3.0
_WINDOW_S = 20.0


def _start(launcher, nodes, stack, whole=True):
    """A job whose workers are idle; returns the processes of each node without the workers', or the launchers only."""
    job = stack.enter_context(Job(launcher))
    job.start(str(nodes), _NPROC, "wait")
    workers = job.wait(nodes * _NPROC, "started")
    time.sleep(_SETTLE_S)
    theirs = set().union(*(procfs.family(event.pid) for event in workers))
    return [procfs.family(node.pid) - theirs if whole else {node.pid} for node in job.nodes]


def _memory_mb(launcher, nodes, size):
    """The larger node's."""
    with contextlib.ExitStack() as stack:
        return max(size(pids) for pids in _start(launcher, nodes, stack))


def _wake_ups(launchers, nodes, repeats, whole):
    """Windows of 20 s; the jobs idle side by side, so each window is the same for all. The busier node counts."""
    samples = {}
    with contextlib.ExitStack() as stack:
        groups = {who.name: _start(who, nodes, stack, whole) for who in launchers.rivals()}
        for _ in range(repeats):
            before = {name: [procfs.switches(pids) for pids in group] for name, group in groups.items()}
            time.sleep(_WINDOW_S)
            for name, group in groups.items():
                counts = [procfs.switches(pids) - was for pids, was in zip(group, before[name], strict=True)]
                samples.setdefault(name, []).append(max(counts) / _WINDOW_S)
    return samples


def _memory(name, what, nodes, size):
    return Figure(name, what, "MB", 60.0, in_turns(lambda who: _memory_mb(who, nodes, size), Launchers.rivals))


def _idle(name, what, nodes, target, whole=True):
    def measure(launchers, repeats):
        return _wake_ups(launchers, nodes, repeats, whole)

    return Figure(name, what, "/s", target, measure)


FIGURES = [
    _memory("memory-1", "agent + 8 monitors, PSS, 1 node", 1, procfs.pss_mb),
    _memory("memory-2", "the same as one of 2 nodes", 2, procfs.pss_mb),
    _memory("memory-2-alone", "the same, sharing no page with the other node", 2, procfs.alone_mb),
    _idle("wakeups-1", "idle wake-ups, agent + 8 monitors, 1 node", 1, 2.0),
    _idle("wakeups-2", "the same as one of 2 nodes", 2, 2.5),
    _idle("wakeups-2-agent", "the same, the agent alone", 2, 1.0, False),
]
