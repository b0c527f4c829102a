"""The user's script of all figures but `warm-*`. It tells the harness, through a FIFO, what happened and when.

It imports torch nowhere: a launcher that reads scripts would prepare it, and the figures are of the launcher alone.

worker.py wait           say "started"; on SIGUSR1 say "dying" and exit with 1
worker.py stop | sleep   say "started"; one heartbeat, say "heartbeat"; then hang (SIGSTOP, or asleep for good)
worker.py nested         say "started"; open three sections, one within the other, say "opened"; then hang
worker.py time CALLS     say "started"; on SIGUSR1 time CALLS (heartbeats | sections | ends), say "took" (median in us)
worker.py beat EVERY_S   say "started"; heartbeats for good; on SIGUSR1 one more, say "heartbeat"; then hang
worker.py shutdown       say "started"; on SIGUSR1 say "asking" and ask for the end of the job
"""

import time

first_line_s = time.monotonic()  # one clock for all processes of this machine

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402

LONGEST_LIFE_S = float(os.environ.get("BENCH_LIFE_S", "120"))  # nobody stays for ever, even if the harness was killed
BATCH, BATCHES = 20, 500
BLOCKED_AFTER_S = 5.0


def tell(what, at_s):
    """One short line; writes up to PIPE_BUF to a FIFO are not mixed up with others."""
    line = f"{what} {os.environ['RANK']} {os.getpid()} {at_s:.6f}\n"
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, line.encode())
    os.close(fd)


def asked(timeout_s):
    """Wait for the harness; whether it asked in time."""
    return signal.sigtimedwait({signal.SIGUSR1}, timeout_s) is not None


def wait():
    """Idle until the harness asks for a fault."""
    tell("started", first_line_s)
    if asked(LONGEST_LIFE_S):
        tell("dying", time.monotonic())
        os._exit(1)


def monitored():
    """A client that the launcher's rank monitor knows; then say "started"."""
    if os.environ["BENCH_CLIENT"] == "nvrx":
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    else:
        from nvrx_slurm.fault_tolerance import RankMonitorClient
    client = RankMonitorClient()
    client.init_workload_monitoring()
    tell("started", first_line_s)
    return client


def last_heartbeat(client):
    """Say when it was, and no more after it."""
    before_s = time.monotonic()
    client.send_heartbeat()
    tell("heartbeat", before_s)


def hang(by):
    """Give one sign of life and then no more."""
    last_heartbeat(monitored())
    if by == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(LONGEST_LIFE_S)


def nested():
    """Hang in three sections."""
    client = monitored()
    before_s = time.monotonic()
    for section in ("outer", "middle", "inner"):
        client.start_section(section)
    tell("opened", before_s)
    time.sleep(LONGEST_LIFE_S)


def median_us(call):
    """Of batches, so that reading the clock does not count."""
    samples = []
    for _ in range(BATCHES):
        before_ns = time.perf_counter_ns()
        for _ in range(BATCH):
            call()
        samples.append((time.perf_counter_ns() - before_ns) / BATCH / 1000)
    return sorted(samples)[BATCHES // 2]


def end_us(client):
    """The median of end_section() alone, less what reading the clock takes."""
    ends, reads = [], []
    for _ in range(BATCH * BATCHES):
        client.start_section("step")
        before_ns = time.perf_counter_ns()
        client.end_section("step")
        after_ns = time.perf_counter_ns()
        ends.append(after_ns - before_ns)
        reads.append(time.perf_counter_ns() - after_ns)
    return (sorted(ends)[len(ends) // 2] - sorted(reads)[len(reads) // 2]) / 1000


def time_calls(what):
    """The median in us, "inf" if it is not there after 5 s: the calls block."""
    import threading

    client = monitored()

    def section():
        client.start_section("step")
        client.end_section("step")

    took = [float("inf")]

    def measure():
        calls = client.send_heartbeat if what == "heartbeats" else section
        took[0] = end_us(client) if what == "ends" else median_us(calls)

    if asked(LONGEST_LIFE_S):
        thread = threading.Thread(target=measure, daemon=True)
        thread.start()
        thread.join(BLOCKED_AFTER_S)
        tell("took", took[0])
        signal.sigtimedwait(set(), LONGEST_LIFE_S)


def beat(every_s):
    """Heartbeats until the harness asks for a hang."""
    client = monitored()
    until_s = time.monotonic() + LONGEST_LIFE_S
    client.send_heartbeat()
    while time.monotonic() < until_s:
        if asked(every_s):
            last_heartbeat(client)
            time.sleep(LONGEST_LIFE_S)
        client.send_heartbeat()


def shutdown():
    """Ask for the end of the job when the harness says so."""
    from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest

    client = monitored()
    if asked(LONGEST_LIFE_S):
        tell("asking", time.monotonic())
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "benchmark"))
        signal.sigtimedwait(set(), LONGEST_LIFE_S)


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
mode = sys.argv[1]
if mode == "wait":
    wait()
elif mode == "nested":
    nested()
elif mode == "time":
    time_calls(sys.argv[2])
elif mode == "beat":
    beat(float(sys.argv[2]))
elif mode == "shutdown":
    shutdown()
else:
    hang(mode)
