"""Later versions of Slurm for the minicluster: the packages of later releases of Debian, beside the system's own.

`install` brings one by apt-get to /opt/slurm-VERSION, with the C library that it needs, in about 15 s and 25 MB. It
asks the mirror that apt already uses. The programs run on Debian 12: patchelf sets where they find the libraries.
`scripts/test` runs this file before pytest: it installs all versions, and prints a line for each that cannot be had.
"""

import fcntl
import os
import shutil
import subprocess
import sysconfig
import tempfile
from contextlib import contextmanager
from pathlib import Path

from nvrx_slurm.errors import UsageError

_RELEASES = {"24.11": "trixie", "26.05": "forky"}  # of Debian; the last one moves on
VERSIONS = tuple(_RELEASES)
_HOME = Path("/opt")
_INSTALL_S = 300.0
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libslurm-dev")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_LIB = f"usr/lib/{sysconfig.get_config_var('MULTIARCH')}"


def prefix(version):
    """Where a version is."""
    return _HOME / f"slurm-{version}"


def bins(version):
    """The folders of a version's programs, for PATH; none for "" (Debian's own Slurm)."""
    return [f"{prefix(version)}/{name}" for name in ("bin", "sbin")] if version else []


def without_builds(path):
    """`path` (as in PATH) without the programs of any of these versions."""
    ours = {folder for version in VERSIONS for folder in bins(version)}
    return ":".join(folder for folder in path.split(":") if folder not in ours)


def runs(version):
    """Whether a version is installed, and works here."""
    program = prefix(version) / "sbin/slurmctld"
    return program.exists() and not subprocess.run([str(program), "-V"], capture_output=True, timeout=30).returncode


def unavailable(version):
    """Why this version cannot be used here (one sentence), or None."""
    if not version or prefix(version).exists():
        return None
    if version not in _RELEASES:
        return f"there is no Slurm {version} in Debian; use one of {', '.join(VERSIONS)}, or none for Debian 12's."
    if shutil.which("apt-get") is None or not Path(_KEYS).exists():
        return f"Slurm {version} comes from Debian's packages, and this machine has no apt-get or no keys of Debian."
    if os.geteuid() != 0:
        return f"Slurm {version} is not in {_HOME}, which needs root: scripts/minicluster up --slurm {version}."
    return None


def install(version):
    """Bring a version where it is not here yet; one process at a time. Raises UsageError with what is missing."""
    if reason := unavailable(version):
        raise UsageError(f"minicluster: {reason}")
    if not version:
        return
    with _alone():
        if prefix(version).exists():
            return
        try:
            with tempfile.TemporaryDirectory(prefix=".slurm-", dir=_HOME) as folder:
                _unpack(version, Path(folder)).rename(prefix(version))
        except subprocess.CalledProcessError as error:
            why = (error.stderr.strip().splitlines() or [f"code {error.returncode}"])[-1]
            raise UsageError(f"minicluster: Slurm {version}: {error.cmd[0]} failed: {why}") from None
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"minicluster: Slurm {version}: {error.cmd[0]} took over {_INSTALL_S:g} s.") from None


def loader(version):
    """What goes before a command that loads libslurm of a version: its C library is later than the system's."""
    if not version:
        return []
    folder = prefix(version) / _LIB
    return [str(next(folder.glob("ld-linux*.so*"))), "--library-path", f"{folder}:/{_LIB}"]


def pyslurm(version):
    """The wheel that NVRX_PYSLURM names, if it is for this version. It builds against the same version only, and PyPI
    has none for a Slurm of Debian's yet."""
    wheel = Path(os.environ.get("NVRX_PYSLURM", ""))
    return wheel if version and wheel.name.startswith(f"pyslurm-{version}.") and wheel.exists() else None


@contextmanager
def _alone():
    with open(_HOME / ".slurm-install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(*argv):
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    command = [str(word) for word in argv]
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_INSTALL_S, check=True
    ).stdout


def _mirror():
    """The mirror of Debian that apt uses."""
    for mirror in _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages").splitlines():
        if mirror.rstrip("/").endswith("/debian"):
            return mirror
    raise UsageError("minicluster: apt's sources have no mirror of Debian.")


def _unpack(version, folder):
    """The files of a version, which work once they are at `prefix`; nothing of the system changes but for patchelf."""
    if shutil.which("patchelf") is None:
        _run("apt-get", "-qq", "-y", "-oDpkg::Lock::Timeout=300", "install", "patchelf")
    source, status, root = folder / "sources.list", folder / "status", folder / "root"
    lists, archives = folder / "lists", folder / "archives"
    for place in (lists / "partial", archives / "partial", root):
        place.mkdir(parents=True)
    status.touch()
    source.write_text(f"deb [signed-by={_KEYS}] {_mirror()} {_RELEASES[version]} main\n")
    settings = {
        "Etc::SourceList": source, "Etc::SourceParts": "/dev/null", "State::Lists": lists, "State::status": status,
        "Cache": folder, "Cache::archives": archives,
    }  # fmt: skip
    apt = ["apt-get", *(f"-oDir::{name}={value}" for name, value in settings.items()), "-oAPT::Sandbox::User=root"]
    _run(*apt, "-qq", "update")
    _run(*apt, "-qq", "-y", "--no-install-recommends", "--download-only", "install", *_PACKAGES)
    for package in archives.glob("*.deb"):
        _run("dpkg", "-x", package, root)
    found = {package.name.split("_")[1].split("-")[0] for package in archives.glob("slurmctld_*")}
    if not any(one.startswith(f"{version}.") for one in found):
        raise UsageError(f"minicluster: Debian {_RELEASES[version]} has Slurm {', '.join(found)}, not {version}.")
    _mend(root, prefix(version))
    return root


def _mend(root, home):
    """Have what is below `root`, and will be at `home`, use its own loader and libraries, under its own names."""
    loader = next((root / _LIB).glob("ld-linux*.so*"))
    way = ["--force-rpath", "--set-rpath", f"{home}/{_LIB}:{home}/{_LIB}/slurm-wlm"]
    programs = [*filter(_is_elf, root.glob("usr/*bin/s*"))]
    libraries = [one for one in (root / _LIB).rglob("*.so*") if _is_elf(one)]
    _run("patchelf", "--set-interpreter", f"{home}/{_LIB}/{loader.name}", *way, *programs)
    _run("patchelf", *way, *(one for one in libraries if not one.name.startswith(("ld-linux", "libc.so"))))
    for name in ("bin", "sbin"):
        (root / name).mkdir(exist_ok=True)
    for program in root.glob("usr/bin/s*"):
        (root / "bin" / program.name).symlink_to(f"../usr/bin/{program.name}")
    for name in _DAEMONS:  # each asks for its own name, and slurmd for the place of slurmstepd
        (root / "usr/sbin" / name).unlink(missing_ok=True)
        (root / "usr/sbin" / name).symlink_to(f"{name}-wlm")
        (root / "sbin" / name).symlink_to(f"../usr/sbin/{name}")
    slurmd = root / "sbin/slurmd"
    slurmd.unlink()
    slurmd.write_text(f'#!/bin/sh\nexec {home}/usr/sbin/slurmd -d {home}/usr/sbin/slurmstepd "$@"\n')
    slurmd.chmod(0o755)
    for name, to in {"plugins": f"{_LIB}/slurm-wlm", "include": "usr/include", "lib": _LIB}.items():
        (root / name).symlink_to(to)


def _is_elf(file):
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(4) == b"\x7fELF"


if __name__ == "__main__":
    for each in VERSIONS:
        try:
            install(each)
        except UsageError as error:
            print(f"Slurm {each} ({str(error).removeprefix('minicluster: ').rstrip('.')})")
