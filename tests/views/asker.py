"""A program that has `nvrx` read each run that stdin names, and tells as JSON what went wrong. It imports little."""

import json
import sys
import time
from pathlib import Path
from traceback import format_exception

from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main

MOST_S, MOST_WALL_S = 1.0, 20.0  # of a processor; and by the clock, where others have the processors
OF_RUN = (
    "status", "status --json --ranks", "why", "why --json", "report -o page.html", "goodput", "logs --cycle all",
    "replay",
)  # fmt: skip


def ask(words):
    """The result of a command, and what it has done that none may do."""
    began, used = time.monotonic(), time.process_time()
    told = CliRunner().invoke(main, words.split())
    took_s, used_s = time.monotonic() - began, time.process_time() - used
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        return told, "".join(format_exception(told.exception))
    shown = {
        word.decode() for word in (b"SECRET", b"\x1b", b"Traceback") if word in told.stdout_bytes + told.stderr_bytes
    }
    bad = (
        shown
        or used_s > MOST_S
        or took_s > MOST_WALL_S
        or told.exit_code not in range(4)
        or (told.exit_code == 2 and not told.stderr and "needs a person" not in told.stdout)
    )
    return told, f"code {told.exit_code}, {used_s:.1f} of {took_s:.1f} s, {shown}" if bad else ""


OF_ALL = ("list --all", "goodput --since 999w", "metrics")  # PET_LOG_DIR is the tree

if __name__ == "__main__":
    runs = json.load(sys.stdin)
    found = {f"nvrx {words}: {what}": ask(f"{words} {place}")[1] for what, place in runs.items() for words in OF_RUN}
    found |= {words: why for words in OF_ALL if (why := ask(words)[1]) and " s, " not in why}  # however long it takes
    peak_kb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    print(json.dumps({"peak_mb": peak_kb >> 10, "wrong": {what: why for what, why in found.items() if why}}))
