"""Starts a hook: `python -s -S start.py prolog|epilog|periodic|version`, for hook.sh, as root.

hook.sh has checked this Python, its standard library and the package's trust.py. From here on trust.py checks each
module before it is imported. Without site (-S) no .pth file is executed.
"""

from __future__ import annotations

import os
import sys
import zipimport  # frozen, as what it imports
from _frozen_importlib_external import SourceFileLoader  # importlib.machinery is a file that nothing has checked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

BROKEN = 3  # exit code: the hook does not work; 0 and 10 are verdicts
_NOT_FOR_CHILDREN = ("PYTHONHOME", "PYTHONSAFEPATH")


class FromSource(SourceFileLoader):
    """Ignores the compiled form of a module: hook.sh has checked the source only."""

    def get_code(self, fullname: str) -> CodeType:
        """See the class."""
        return self.source_to_code(self.get_data(self.path), self.path)


def guard_imports() -> None:
    """Have system/trust.py of the package check each import from now on."""
    package = os.environ["NVRX_PACKAGE"]
    folder, trust = f"{package}/nvrx_slurm/system", type(sys)("trust")
    is_bundle = os.path.isfile(package)  # which hook.sh has checked
    loader = zipimport.zipimporter(folder) if is_bundle else FromSource("trust", f"{folder}/trust.py")
    loader.exec_module(trust)
    trust.guard_imports()


def folders() -> list[str]:
    """Folders that may hold our package and its dependencies: PACKAGE, and the site-packages of this Python."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefixes = dict.fromkeys((os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, "/usr/local", "/usr"))
    libraries = [f"{prefix}/{lib}/{version}" for prefix in prefixes for lib in ("lib", "lib64")]
    found = [f"{library}/{name}" for library in libraries for name in ("site-packages", "dist-packages")]
    wanted = [os.environ.get("NVRX_PACKAGE", ""), *found, "/usr/lib/python3/dist-packages"]
    return [folder for folder in dict.fromkeys(wanted) if folder and os.path.exists(folder)]


def say(text: str) -> None:
    """Write to the terminal and the system log, without waiting for the latter."""
    logger = ["/usr/bin/logger", "-p", "daemon.err", "-t", f"nvrx-{sys.argv[1]}", "--", text[:2000].replace("\0", "?")]
    try:
        print(text, file=sys.stderr)
        if sys.argv[1] != "version":
            os.posix_spawn("/usr/bin/timeout", ["timeout", "-s", "KILL", "5", *logger], {})
    except OSError:
        return


def main() -> int:
    """Returns the exit code for hook.sh."""
    for name in [name for name, value in os.environ.items() if not value or name in _NOT_FOR_CHILDREN]:
        del os.environ[name]  # hook.sh passes unset variables as empty ones, which Slurm's tools tell apart
    try:
        guard_imports()
        sys.path += folders()
        from nvrx_slurm import __version__
        from nvrx_slurm.health.hooks import run

        if sys.argv[1] == "version":
            print(__version__)
            return 0
        return run.main(sys.argv[1])
    except (Exception, SystemExit) as error:  # a module that exits must not report a healthy node
        say(f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # hook.sh waits: skip the interpreter's teardown
