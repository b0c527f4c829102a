"""A node with all cores busy: no rank that sends its heartbeats is taken for hung (10 minutes: scripts/bench)."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from agent_harness import Rig


def test_no_false_alarm_with_all_cores_busy(rig: Rig) -> None:
    """8 ranks beat at 1/4 of their timeout for 3 s beside one busy process per core; then one hangs and is found."""
    script = rig.script("""
        from nvrx_slurm.fault_tolerance import RankMonitorClient
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.send_heartbeat()
        until_s, beats = time.monotonic() + 3.0, 0
        while CYCLE == 0 and time.monotonic() < until_s:
            signal.sigtimedwait((), 0.5)
            client.send_heartbeat()
            beats += 1
        say("beaten", beats)
        if CYCLE == 0 and RANK == 5:
            forever()
        client.shutdown_workload_monitoring()
    """)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        one = rig.run(
            script, "--nproc-per-node=8", "--max-restarts=1", "--ft-initial-rank-heartbeat-timeout=20",
            "--ft-rank-heartbeat-timeout=2",
        )  # fmt: skip
        assert one.wait() == 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    hung = re.findall(r"rank (\d) .* hung: no heartbeat for 2\.\d+ s", one.text)
    assert set(hung) == {"5"} and one.text.count("restart 1 of 1") == 1
    assert [int(beats) > 3 for beats in re.findall(r"beaten ([1-9]\d*)", one.text)] == [True] * 8
