"""The system clock set back an hour in the middle of a job: nothing of ours decides by it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_harness import Rig

# Interposed before libc: the wall clock of every process of the job is an hour behind once a file is there.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long back(void) {
    const char *path = getenv("NVRX_TEST_CLOCK");
    return path && access(path, F_OK) == 0 ? 3600 : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec -= back();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int result = clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return result;
}
time_t time(time_t *where) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (where) *where = found.tv_sec;
    return found.tv_sec;
}
"""


@pytest.fixture
def shim(rig: Rig) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a wall clock with")
    (rig.dir / "shim.c").write_text(SHIM)
    path = rig.dir / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, rig.dir / "shim.c", "-ldl"], check=True, timeout=60)
    return path


def test_the_clock_is_set_back_an_hour(rig: Rig, shim: Path) -> None:
    """Two nodes with keepalives and heartbeats go on; afterwards a hang is found in its time and the job restarts."""
    back = rig.dir / "back"
    script = rig.script("""
        from nvrx_slurm.fault_tolerance import RankMonitorClient
        client = RankMonitorClient()
        client.init_workload_monitoring()
        before, seen, until_s = time.time(), False, None
        say("up", CYCLE, RANK)
        while CYCLE == 0 and (until_s is None or time.monotonic() < until_s):
            client.send_heartbeat()
            if not seen and time.time() < before - 1800:
                seen, until_s = True, time.monotonic() + 3.0  # several keepalives and timeouts long
                say("back", RANK)
            signal.sigtimedwait((), 0.05)
        if CYCLE == 0 and RANK == 1:
            say("hanging")
            forever()
        while CYCLE == 0:
            client.send_heartbeat()
            signal.sigtimedwait((), 0.05)
    """)
    flags = ("--max-restarts=1", "--ft-keepalive-interval=1", "--ft-keepalive-timeout=1")
    timeouts = ("--ft-initial-rank-heartbeat-timeout=20", "--ft-rank-heartbeat-timeout=2")
    env = {"LD_PRELOAD": str(shim), "NVRX_TEST_CLOCK": str(back)}
    first, second = rig.nodes(2, "2", script, *flags, *timeouts, **env)
    first.line("up 0 0"), second.line("up 0 1")
    back.write_text("")
    first.line("back 0"), second.line("back 1")
    second.line("hanging")
    first.line("up 1 0"), second.line("up 1 1")
    assert [first.wait(), second.wait()] == [0, 0]
    limit = re.search(r"hung: no heartbeat for (\S+) s \(limit 2 s\); restart 1 of 1", first.text)
    assert limit is not None and 2.0 <= float(limit[1]) < 4.0
    assert "lost" not in first.text + second.text
