"""Starts a hook: `python -s -S start.py prolog|epilog|periodic|version`, for hook.sh, as root.

hook.sh has checked this Python, its standard library and the package's trust.py. From here on trust.py checks each
module before it is imported. Without site (-S) no .pth file is executed.
"""

import os
import sys

BROKEN = 3  # exit code: the hook does not work; 0 and 10 are verdicts
_NOT_FOR_CHILDREN = ("PYTHONHOME", "PYTHONSAFEPATH")


def trust(package: str) -> dict[str, object]:
    """The names in system/trust.py of the package. It is compiled from its source, which hook.sh has checked."""
    path = f"{package}/nvrx_slurm/system/trust.py"
    names: dict[str, object] = {"__name__": "trust"}
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), names)
    return names


def folders() -> list[str]:
    """Folders that may hold our package and its dependencies: PACKAGE, and the site-packages of this Python."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    prefixes = dict.fromkeys((os.path.dirname(os.path.dirname(sys.executable)), sys.prefix, "/usr/local", "/usr"))
    libraries = [f"{prefix}/{lib}/{version}" for prefix in prefixes for lib in ("lib", "lib64")]
    found = [f"{library}/{name}" for library in libraries for name in ("site-packages", "dist-packages")]
    wanted = [os.environ.get("NVRX_PACKAGE", ""), *found, "/usr/lib/python3/dist-packages"]
    return [folder for folder in dict.fromkeys(wanted) if folder and os.path.isdir(folder)]


def say(text: str) -> None:
    """To the terminal and the system log, without waiting for the latter."""
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
        trust(os.environ["NVRX_PACKAGE"])["guard_imports"]()  # type: ignore[operator]
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
