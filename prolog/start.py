"""Starts a hook: `python -I -S start.py prolog|epilog|periodic`, by hook.sh, as root, with a cleared environment.

Everything that is imported, here and by the checks, must be root's, and only root's to write to: without site (-S) no
.pth file is executed, and the finder below looks at each module, its compiled form and all directories above it.

Loading takes most of a hook's processor time. Where many jobs start on one node, hook.sh lets as many hooks as there
are processors do that at a time (NVRX_TURN): all at once, each would take as long as all of them together.
"""

from __future__ import annotations

import fcntl
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

TYPE_CHECKING = False  # typing itself takes as long to load as Python
if TYPE_CHECKING:
    from typing import Any

BROKEN = 3  # hook.sh: this hook does not work; 0 and 10 are verdicts
_trusted: set[str] = set()


class FromSource(SourceFileLoader):
    """Not from its compiled form: nobody has looked whose that is. hook.sh has looked at the source."""

    def get_code(self, fullname: str) -> CodeType:
        """See the class."""
        return self.source_to_code(self.get_data(self.path), self.path)


_trust = ModuleType("trust")
FromSource("trust", f"{os.path.dirname(os.path.abspath(__file__))}/trust.py").exec_module(_trust)


def require(path: str) -> None:
    """ImportError if anybody but root could have written or replaced `path`."""
    _trust.require(path, ImportError, _trusted)


def over() -> None:
    """All is loaded: the turn, a lock of flock(1) that came with us, is the next one's."""
    try:
        fcntl.flock(int(os.environ["NVRX_TURN"]), fcntl.LOCK_UN)
    except (KeyError, OSError):  # we came without
        return


class TrustedFinder:
    """Finds modules as Python does, and looks whose they are."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As PathFinder.find_spec; raises ImportError for what is not trusted."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.has_location:
            return spec
        cache = os.path.dirname(spec.cached or "")  # who may write there makes the compiled form after we have looked
        for place in (spec.origin, spec.cached, cache):
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


def say(text: str) -> None:
    """As hook.sh does: the system's log is not waited for, and whoever tells it gives up if it does not listen."""
    logger = ["/usr/bin/logger", "-p", "daemon.err", "-t", f"nvrx-{sys.argv[1]}", "--", text[:2000].replace("\0", "?")]
    try:
        print(text, file=sys.stderr)
        if sys.argv[1] != "version":
            os.posix_spawn("/usr/bin/timeout", ["timeout", "-s", "KILL", "5", *logger], {})
    except OSError:
        return


def main() -> int:
    """Returns the exit code for hook.sh."""
    for name in [name for name, value in os.environ.items() if not value]:
        del os.environ[name]  # hook.sh passes on what is not set as empty, which Slurm's tools do not take for unset
    try:
        require(os.__file__)
        sys.meta_path[sys.meta_path.index(PathFinder)] = TrustedFinder
        sys.path += places()
        if sys.argv[1] == "version":  # nvrx doctor: all that hooks need can be loaded
            from nvrx_slurm import __version__
            from nvrx_slurm.health.hooks import run as hooks

            print(__version__)
            return 0
        from nvrx_slurm.health.hooks import run as hooks

        return hooks.main(sys.argv[1], ready=over)
    except (Exception, SystemExit) as error:  # a module that exits would say that the node is well
        say(f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no time for tidying up
