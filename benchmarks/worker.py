"""The user's script of all figures; imports no torch. It tells the harness, through a FIFO, what happened and when.

worker.py wait           say "started"; on SIGUSR1 say "dying" and exit with 1
worker.py stop | sleep   say "started"; one heartbeat, say "heartbeat"; then hang (SIGSTOP, or asleep for good)
"""

import time

first_line_s = time.monotonic()  # one clock for all processes of this machine

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

LONGEST_LIFE_S = 120  # nobody stays for ever, even if the harness was killed


def tell(what, at_s):
    """One short line; writes up to PIPE_BUF to a FIFO are not mixed up with others."""
    line = f"{what} {os.environ['RANK']} {os.getpid()} {at_s:.6f}\n"
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, line.encode())
    os.close(fd)


def wait():
    """Idle until the harness asks for a fault."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    tell("started", first_line_s)
    if signal.sigtimedwait({signal.SIGUSR1}, LONGEST_LIFE_S) is not None:
        tell("dying", time.monotonic())
        os._exit(1)


def hang(by):
    """Give one sign of life and then no more."""
    if os.environ["BENCH_CLIENT"] == "nvrx":
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    else:
        from nvrx_slurm.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    tell("started", first_line_s)
    before_s = time.monotonic()
    client.send_heartbeat()
    tell("heartbeat", before_s)
    if by == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONGEST_LIFE_S)


if sys.argv[1] == "wait":
    wait()
else:
    hang(sys.argv[1])
