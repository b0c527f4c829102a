"""Starts a hook: `python -I -S start.py prolog|epilog|periodic`, by hook.sh, as root, with a cleared environment.

Everything that is imported, here and by the checks, must be root's, and only root's to write to: without site (-S) no
.pth file is executed, and the finder below looks at each module, its compiled form and all directories above it.

Loading takes most of a hook's processor time. Where many jobs start on one node, as many hooks as there are processors
do that at a time: all at once, each would take as long as all of them together, and none would be in time.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
import time
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

TYPE_CHECKING = False  # typing itself takes as long to load as Python
if TYPE_CHECKING:
    from typing import Any

BROKEN = 3  # hook.sh: this hook does not work; 0 and 10 are verdicts
_TURN_OF_BUDGET = 0.6  # longest wait for one's turn, as a part of the hook's time
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


class Turn:
    """The right to load, one of as many as there are processors; given back by `over` or by the end of the process."""

    def __init__(self, directory: str, wait_s: float) -> None:
        """Returns at the latest after `wait_s`, or at once without a directory that is root's alone: then without."""
        self._fd = -1
        try:
            self._take(directory, len(os.sched_getaffinity(0)), wait_s)
        except OSError:
            self.over()

    def _take(self, directory: str, turns: int, wait_s: float) -> None:
        if not os.path.lexists(directory):
            os.mkdir(directory, 0o700)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(f"{directory}/turn", flags, 0o600)
        mine = os.getpid() % turns
        for place in (*range(mine, turns), *range(mine)):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                return
            except BlockingIOError:
                pass
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, max(wait_s, 0.01))
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, mine)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _late(self, signum: int, frame: object) -> None:
        raise TimeoutError

    def over(self) -> None:
        """The next one may."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def turn() -> Turn:
    """Wait for it."""
    budget_s, since_s = float(os.environ["NVRX_BUDGET"]), float(os.environ["NVRX_SINCE"])
    used_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_s)
    return Turn(f"{os.environ.get('NVRX_SYSROOT', '')}/run/nvrx-health", _TURN_OF_BUDGET * budget_s - used_s)


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
            from nvrx_slurm.health import hooks

            print(__version__)
            return 0
        mine = turn()
        from nvrx_slurm.health import hooks

        return hooks.main(sys.argv[1], ready=mine.over)
    except (Exception, SystemExit) as error:  # a module that exits would say that the node is well
        say(f"{type(error).__name__}: {error}")
        return BROKEN


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no time for tidying up
