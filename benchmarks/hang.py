"""How long after its timeout a hung rank is dead."""

from benchmarks.figures import Figure, in_turns
from benchmarks.harness import Job, wait_dead

_TIMEOUT_S = 1.0
_GIVE_UP_S = 30.0


def _lateness_ms(launcher, mode):
    """Last heartbeat + timeout to the moment its pidfd says that it is dead, in ms."""
    limits = [f"--ft-initial-rank-heartbeat-timeout={_TIMEOUT_S}", f"--ft-rank-heartbeat-timeout={_TIMEOUT_S}"]
    with Job(launcher) as job:
        job.start("1", 1, mode, limits)
        (heartbeat,) = job.wait(1, "heartbeat")
        return (wait_dead(heartbeat.pid, _GIVE_UP_S) - heartbeat.at_s - _TIMEOUT_S) * 1000


def _figure(name, what, mode):
    return Figure(name, what, "ms", 15.0, in_turns(lambda who: _lateness_ms(who, mode)))


FIGURES = [
    _figure("hang-stop", "hang (SIGSTOP): kill after the timeout", "stop"),
    _figure("hang-sleep", "hang (asleep): kill after the timeout", "sleep"),
]
