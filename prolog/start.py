"""Starts a hook: `python -I -S start.py prolog|epilog|periodic`, by hook.sh, as root, with a cleared environment.

Everything that is imported, here and by the checks, must be root's, and only root's to write to: without site (-S) no
.pth file is executed, and the finder below looks at each module, its compiled form and all directories above it.
"""

from __future__ import annotations

import os
import runpy
import sys
import syslog
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

BROKEN = 3  # hook.sh: this hook does not work; 0 and 10 are verdicts
_trusted: set[str] = set()
# From its source: nobody has looked whose the compiled form is. hook.sh has looked at the file.
_require = runpy.run_path(f"{os.path.dirname(os.path.abspath(__file__))}/trust.py")["require"]


def require(path: str) -> None:
    """ImportError if anybody but root could have written or replaced `path`."""
    _require(path, ImportError, _trusted)


class TrustedFinder:
    """Finds modules as Python does, and looks whose they are."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As PathFinder.find_spec; raises ImportError for what is not trusted."""
        spec = PathFinder.find_spec(name, path, target)
        for place in (spec.origin, spec.cached) if spec and spec.has_location else ():
            if place and os.path.lexists(place):
                require(place)
        return spec


def places() -> list[str]:
    """Where our package and what it needs may be: PACKAGE of hooks.conf, and what belongs to this Python."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefixes = dict.fromkeys((os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, "/usr/local", "/usr"))
    libraries = [f"{prefix}/{lib}/{version}" for prefix in prefixes for lib in ("lib", "lib64")]
    found = [f"{library}/{name}" for library in libraries for name in ("site-packages", "dist-packages")]
    wanted = [os.environ.get("NVRX_PACKAGE", ""), *found, "/usr/lib/python3/dist-packages"]
    return [place for place in dict.fromkeys(wanted) if place and os.path.isdir(place)]


def main() -> int:
    """Returns the exit code for hook.sh."""
    for name in [name for name, value in os.environ.items() if not value]:
        del os.environ[name]  # hook.sh passes on what is not set as empty, which Slurm's tools do not take for unset
    try:
        require(os.__file__)
        sys.meta_path[sys.meta_path.index(PathFinder)] = TrustedFinder
        sys.path += places()
        from nvrx_slurm import __version__
        from nvrx_slurm.health import hooks

        if sys.argv[1] == "version":  # nvrx doctor: all that hooks need can be loaded
            print(__version__)
            return 0
        return hooks.main(sys.argv[1])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        syslog.openlog(f"nvrx-{sys.argv[1]}", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR, text)
        print(text, file=sys.stderr)
        return BROKEN


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no time for tidying up
