#!/usr/bin/env python3
"""Count how often one restart goes from file to file: `python scripts/lib/moves.py [-v]`.

The scenario: nvrx-run on one node without a network, two executed ranks; rank 1 exits with 3. The way begins where
the agent hears of the exit and ends where it releases the first worker of the next cycle, in its main thread. A move
is a call from a function in one file of `nvrx_slurm` to a function in another one.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
PACKAGE = f"{REPO / 'nvrx_slurm'}/"
SCRIPT = "import os, sys\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': sys.exit(3 * int(os.environ['RANK']))\n"
# Words in the names of files that only tell what happens.
ASIDE = ("logs", "event_log", "record", "account", "output", "status", "console", "publish", "report")

Move = tuple[str, str, str]


def is_aside(path):
    """Return whether a file tells about the restart and takes no part in it."""
    return any(word in path for word in ASIDE)


class Way:
    """Records moves between the exit of a worker and the release of the next one."""

    def __init__(self):
        self.moves: list[Move] = []

    def hear(self, frame, event, _):
        """Note one call (as sys.setprofile's function), and stop at the release of a worker."""
        callee, caller = frame.f_code, frame.f_back
        if event != "call" or not callee.co_filename.startswith(PACKAGE):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):  # asyncio, sorted(key=)
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != callee.co_filename:
            before, after = (code.co_filename.removeprefix(PACKAGE) for code in (caller.f_code, callee))
            self.moves.append((before, after, callee.co_name))
        if (callee.co_name, Path(callee.co_filename).name) == ("release", "processes.py"):
            sys.setprofile(None)


def say(title, moves):
    """Print how many there are, and between how many files."""
    files = {name for move in moves for name in move[:2]}
    print(f"{title}: {len(moves)} moves between {len(files)} files", file=sys.stderr)


def main():
    """Run the job in this process and print the way."""
    from nvrx_slurm.cli import run
    from nvrx_slurm.node.workers.workers import Workers

    way, exited = Way(), Workers._exited

    def begin(self, local_rank):
        if not way.moves:
            sys.setprofile(way.hear)
        exited(self, local_rank)

    Workers._exited = begin  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="moves-") as directory:
        script = Path(directory, "train.py")
        script.write_text(SCRIPT)
        flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--ft-warm=off", f"--log-dir={directory}"]
        try:
            code = run.main([*flags, str(script)])
        except SystemExit as end:
            code = end.code or 0
    main_way = [move for move in way.moves if not any(map(is_aside, move[:2]))]
    say("from an exit to the next release", way.moves)
    say("the same without log, account and output", main_way)
    if "-v" in sys.argv:
        for (before, after, what), times in Counter(way.moves).items():
            print(f"  {times:3}  {before:36} -> {after:36} {what}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
