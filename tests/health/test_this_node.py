"""The readers of checks on the machine itself: real processes, kernel log, services, clock, file systems."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import BOUND_S

from nvrx_slurm.health import registry
from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.checks import kernel_log, processes, services, storage
from nvrx_slurm.health.runner import examine
from nvrx_slurm.system.hardware import Absent

LIVE = NodeView("/", {})
EXPECTED = registry.defaults(registry.built_in().values())

# posix_spawn waits in state D until its child has executed the program, which waits for a writer of the FIFO first.
BLOCKED = """
import os, sys
print(os.getpid(), flush=True)
actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
os.waitpid(os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions), 0)
"""


def test_a_process_that_is_really_blocked_is_found(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", BLOCKED, str(fifo)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        poller = select.poll()  # its end would be an event; otherwise looks at its state, with a bound
        poller.register(process.stdout, select.POLLIN)
        for _ in range(int(BOUND_S * 100)):
            if processes.parsed(Path(f"/proc/{pid}/stat").read_text()).state == "D":
                break
            assert not poller.poll(10)
        facts = processes.gather(LIVE, {**EXPECTED, "stuck_s": 0.2})
        assert pid in {found.pid for found in facts.stuck}
        verdict, text = processes.stuck_processes.judge(facts, EXPECTED)
        assert verdict is Verdict.FAIL and "for 0.2 s" in text
    finally:
        with fifo.open("w"):
            process.communicate(timeout=BOUND_S)
    assert process.returncode == 0


def test_the_kernel_log_is_read_to_its_end() -> None:
    try:
        records = list(kernel_log.records(LIVE))
    except (OSError, Absent) as error:
        pytest.skip(f"the kernel's log cannot be read here: {error}")
    numbers = [record.sequence for record in records]
    assert numbers and numbers == sorted(numbers)


def test_processes_and_services() -> None:
    comm = Path("/proc/self/comm").read_text().strip()
    assert comm in services.running(LIVE)
    verdict, text = examine(services.services, LIVE, {**EXPECTED, "services": ("no-such-service-of-ours",)})
    assert verdict is Verdict.FAIL and text.startswith("no-such-service-of-ours")


def test_the_clock_is_asked() -> None:
    assert isinstance(services.gather_time(LIVE, EXPECTED)[0], bool)
    for synchronized, daemons, verdict in (
        (True, [], Verdict.PASS),
        (True, ["chronyd"], Verdict.PASS),
        (False, ["chronyd"], Verdict.UNKNOWN),
        (False, [], Verdict.FAIL),
    ):
        assert services.time_sync.judge((synchronized, daemons), EXPECTED)[0] is verdict


@pytest.mark.parametrize("path", ["/etc/hostname", "/etc", "/dev/null", "/dev/tty0"])
def test_storage_paths_of_every_kind(path: str) -> None:
    """File: read; directory: listed; a device: only stat, never opened (a tape would rewind)."""
    if not os.path.exists(path):
        pytest.skip(f"there is no {path}")
    storage.read_path(LIVE, path)


def test_a_server_that_squashes_root_is_reached() -> None:
    class Squashed(NodeView):
        def path(self, absolute: str) -> str:
            raise PermissionError(13, "Permission denied")

    storage.reach(Squashed(), "/home")
