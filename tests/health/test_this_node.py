"""The readers of checks on the machine itself: real processes, kernel log, services, clock, file systems."""

import os

import pytest
from recorded import CHECKS, EXPECTED, F, N, P

from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.checks import kernel_log, storage, system
from nvrx_slurm.health.runner import examine
from nvrx_slurm.system.hardware import Absent

pytestmark = pytest.mark.process


LIVE = NodeView("/", {})


def test_the_kernel_log_is_read_to_its_end():
    try:
        numbers = [sequence for sequence, _ in kernel_log.records(LIVE)]
    except (OSError, Absent) as error:
        pytest.skip(f"the kernel's log cannot be read here: {error}")
    assert numbers and numbers == sorted(numbers)


def test_systemd_is_asked_for_services(tmp_path, monkeypatch):
    expected = {**EXPECTED, "services": ("slurmd", "munge.service")}
    systemctl = tmp_path / "systemctl"
    monkeypatch.setattr(system, "_SYSTEMCTL", str(systemctl))
    assert examine(CHECKS["services"], LIVE, expected) == (N, "systemd does not run here")
    for said, verdict, text in (
        ("active active", P, "running: slurmd, munge.service"),
        ("reloading failed", F, "munge.service is not running"),
        ("", N, "systemd does not run here"),
    ):
        systemctl.write_text(f'#!/bin/sh\n[ "$*" = "is-active slurmd.service munge.service" ] && echo {said}\n')
        systemctl.chmod(0o755)
        assert examine(CHECKS["services"], LIVE, expected) == (verdict, text)


def test_the_clock_is_asked():
    assert examine(CHECKS["time-sync"], LIVE, EXPECTED)[0] in (P, F)


@pytest.mark.parametrize("path", ["/etc/hostname", "/etc", "/dev/null", "/dev/tty0"])
def test_storage_paths_of_every_kind(path):
    """File: read; directory: listed; a device: only stat, never opened (a tape would rewind)."""
    if not os.path.exists(path):
        pytest.skip(f"there is no {path}")
    storage.read_path(LIVE, path)


def test_a_server_that_squashes_root_is_reached():
    class Squashed(NodeView):
        def path(self, absolute):
            raise PermissionError(13, "Permission denied")

    storage.reach(Squashed(), "/home")
