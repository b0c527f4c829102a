"""Run by `child.trampoline` in a bare interpreter: become the template, whose command line is that of a worker.

    start.py HOOK_DIR PYTHON COMMAND [ARG ...]

COMMAND is PYTHON, or a program such as numactl that executes it. HOOK_DIR has a copy of `template.py` called
sitecustomize.py, which Python imports before it runs the script. If the hook did not load, Python would run the
training script here, as a rank too many. So the hook is tried without a script first.
"""

import os
import sys

HOOK_FAILED, SITE_CHANGES = 97, 98  # exit codes
# Customizations of the user run after our hook, and so after the imports of a template.
_TRIAL = f"""
import os, sys
before = getattr(sys, "_nvrx_before", None)
after = [path for path in sys.path if path], {{**os.environ}}
raise SystemExit({HOOK_FAILED} if before is None else {SITE_CHANGES} if after != before else 0)
"""


def main() -> None:
    """Try the hook, then execute the command with it."""
    hook_dir = sys.argv[1]
    python = sys.argv[2]
    command = sys.argv[3:]
    path = os.environ.get("PYTHONPATH")
    env = {**os.environ, "PYTHONPATH": f"{hook_dir}{os.pathsep}{path}" if path else hook_dir}
    failed = os.spawnve(
        os.P_WAIT, python, [python, "-c", _TRIAL], {**env, "NVRX_TEMPLATE": "trial"}
    )
    if failed:
        os._exit(SITE_CHANGES if failed == SITE_CHANGES else HOOK_FAILED)
    os.execvpe(command[0], command, env)


main()
