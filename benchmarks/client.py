"""What monitoring costs a rank: its calls, with the monitor running and stopped, and the import."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import procfs
from benchmarks.figures import Figure, in_turns
from benchmarks.harness import Failure, Job

_SETTLE_S = 0.3
_LIMITS = [
    "--ft-initial-rank-heartbeat-timeout=600",
    "--ft-rank-heartbeat-timeout=600",
    "--ft-rank-section-timeouts=step:600",
]
_IMPORTS = {
    "nvrx": "from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient",
    "ours": "from nvrx_slurm.fault_tolerance import RankMonitorClient\nimport sys\n"
    "assert not {'torch', 'grpc', 'google'} & set(sys.modules)",
}
_IMPORT_TIMEOUT_S = 60.0


def _call_us(launcher, calls, stopped):
    """Median in the rank; inf where the calls block. `stopped`: all of the launcher but the rank is SIGSTOPped."""
    with Job(launcher) as job:
        job.start("1", 1, f"time {calls}", _LIMITS)
        (rank,) = job.wait(1, "started")
        if stopped:
            (node,) = job.nodes
            for pid in procfs.family(node.pid) - procfs.family(rank.pid) - {node.pid}:
                os.kill(pid, signal.SIGSTOP)
        time.sleep(_SETTLE_S)
        os.kill(rank.pid, signal.SIGUSR1)
        (took,) = job.wait(1, "took")
        return took.at_s


def _process_ms(python, code):
    began_s = time.monotonic()
    done = subprocess.run(
        [python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_TIMEOUT_S
    )
    if done.returncode:
        raise Failure(f"{python} -c {code!r}: {done.stderr.decode(errors='replace')[-500:]}")
    return (time.monotonic() - began_s) * 1000


def _import_ms(launcher):
    """A process that imports the client, less one of the same interpreter that imports nothing."""
    python = str(Path(launcher.program[0]).with_name("python")) if launcher.client == "nvrx" else sys.executable
    bare_ms = _process_ms(python, "pass")
    return _process_ms(python, _IMPORTS[launcher.client]) - bare_ms


def _calls(name, what, calls, stopped, target_us):
    return Figure(name, what, "us", target_us, in_turns(lambda who: _call_us(who, calls, stopped)))


FIGURES = [
    _calls("heartbeat", "send_heartbeat(), median in the rank", "heartbeats", False, 1.0),
    _calls("heartbeat-stopped", "the same with the monitor SIGSTOPped", "heartbeats", True, 1.0),
    _calls("section", "start_section() and end_section()", "sections", False, 3.0),
    _calls("section-end", "end_section() alone", "ends", False, 0.4),
    _calls("section-stopped", "the same with the monitor SIGSTOPped", "sections", True, 3.0),
    Figure("import", "import of fault_tolerance, over bare Python", "ms", 30.0, in_turns(_import_ms)),
]
