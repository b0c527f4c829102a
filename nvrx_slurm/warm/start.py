"""Run by path in a bare interpreter: become the template, whose command line is that of a worker.

    python -I -S start.py HOOK_DIR PYTHON [ARG ...]

HOOK_DIR has a copy of `template.py` called sitecustomize.py, which Python imports before it runs the script. Without
that hook the process would be a rank too many, so a trial run without a script comes first.
"""

import os
import sys

HOOK_FAILED = 97  # exit code


def main() -> None:
    """Try the hook, then execute the command with it."""
    hook_dir, command = sys.argv[1], sys.argv[2:]
    path = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": f"{hook_dir}{os.pathsep}{path}" if path else hook_dir}
    trial = [command[0], "-c", f"raise SystemExit({HOOK_FAILED})"]
    if os.spawnve(os.P_WAIT, command[0], trial, {**env, "NVRX_TEMPLATE": "trial"}):
        os._exit(HOOK_FAILED)
    os.execve(command[0], command, env)


main()
