"""A rank that runs a script, as the interpreter would, but without importing torch once more."""

from __future__ import annotations

import os
import runpy
import sys

from scenarios import Rank, scenario


@scenario
def script(rank: Rank) -> None:
    """`argv`, in the directory `cwd`; what it prints are the rank's events."""
    sys.argv = rank.arguments["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    os.chdir(rank.arguments["cwd"])
    os.dup2(rank.events, 1)
    runpy.run_path(sys.argv[0], run_name="__main__")
