"""Slurm's later versions for the minicluster: ready builds that `install` unpacks to /opt/slurm-VERSION.

The builds lie in the folder `shared/slurm` beside the repository, or in the one that NVRX_SLURM_BUILDS names; its
script `install VERSION` unpacks one and installs the libraries that it needs. Their prefix is compiled in.
`scripts/test` runs this file before pytest: it installs all versions, and prints a line for each that cannot be had.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

from nvrx_slurm.errors import UsageError

VERSIONS = ("24.11", "25.11", "26.05")
_HOME = Path("/opt")
_INSTALL_S = 300.0  # apt-get and 50 MB to unpack
_LAST = "include/slurm/slurm_version.h"  # of what tar unpacks


def bins(version: str) -> list[str]:
    """The folders of a version's programs, for PATH; none for "" (Debian's own Slurm)."""
    return [f"{_HOME}/slurm-{version}/{name}" for name in ("bin", "sbin")] if version else []


def without_builds(path: str) -> str:
    """`path` (as in PATH) without the programs of any of these builds."""
    ours = {folder for version in VERSIONS for folder in bins(version)}
    return ":".join(folder for folder in path.split(":") if folder not in ours)


def installed(version: str) -> bool:
    """Whether a version is unpacked, all of it."""
    return (_HOME / f"slurm-{version}" / _LAST).exists()


def runs(version: str) -> bool:
    """Whether it is unpacked, and its libraries are here."""
    program = _HOME / f"slurm-{version}/sbin/slurmctld"
    return installed(version) and not subprocess.run([str(program), "-V"], capture_output=True, timeout=30).returncode


def unavailable(version: str) -> str | None:
    """Why this version cannot be used here (one sentence), or None."""
    if not version or installed(version):
        return None
    if version not in VERSIONS:
        return f"there is no build of Slurm {version}; use one of {', '.join(VERSIONS)}, or none for Debian's."
    if not (builds() / "install").exists():
        return f"Slurm {version} is not here: {builds()}/install is missing; name the builds by NVRX_SLURM_BUILDS."
    if not os.access(_HOME, os.W_OK):
        return f"Slurm {version} is not unpacked in {_HOME}, which needs root: run {builds()}/install {version}."
    return None


def install(version: str) -> None:
    """Unpack a version, and install its libraries, where they are not yet; one process at a time.

    Raises UsageError with what is missing.
    """
    if reason := unavailable(version):
        raise UsageError(f"minicluster: {reason}")
    if not version or not (builds() / "install").exists():
        return
    lock = os.open(_HOME, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _unpack(version)
    finally:
        os.close(lock)


def _unpack(version: str) -> None:
    if not installed(version):  # an interrupted unpacking leaves the program by which `install` knows a build
        (_HOME / f"slurm-{version}/sbin/slurmctld").unlink(missing_ok=True)
    try:
        subprocess.run(
            [str(builds() / "install"), version], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_INSTALL_S, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"code {error.returncode}"])[-1]
        raise UsageError(f"minicluster: {builds()}/install {version} failed: {why}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"minicluster: {builds()}/install {version} took more than {_INSTALL_S:g} s.") from None


def builds() -> Path:
    """The folder with the builds and the wheel of pyslurm."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "slurm"
    return Path(os.environ.get("NVRX_SLURM_BUILDS") or beside)


if __name__ == "__main__":
    for each in VERSIONS:
        try:
            install(each)
        except UsageError as error:
            print(f"Slurm {each} ({str(error).removeprefix('minicluster: ').rstrip('.')})")
