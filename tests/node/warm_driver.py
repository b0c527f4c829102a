"""Starts workers by `node.workers.launcher` as an agent does, executed or forked: python warm_driver.py < JSON > JSON.

In:  argv (of the workers), envs (one per worker, added to ours), preload (modules; null: execute), path0, directory,
     prefixes (per worker, what goes before argv), imports (modules; the template is made without a word of the user),
     later (modules that a successor of this template imports).
Out: said (sentences), workers: code, out, err of each.
"""

import asyncio
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.node.workers.launcher import Launcher, LauncherHooks
from nvrx_slurm.node.workers.worker_spec import WarmSpec, WorkerContract, WorkerSpec, worker_env

WARNING_SIGNAL = 10
BOUND_S = 150.0


async def run(order):
    """Start all workers, wait for their ends."""
    directory, said = Path(order["directory"]), []
    processes.Orphans()  # standbys come to a subreaper
    preload, imports = order["preload"], order["imports"]
    warm = WarmSpec(order["path0"], preload or (), imports or ()) if preload or imports is not None else None
    prefixes = order["prefixes"]
    spec = WorkerSpec(
        order["argv"], WorkerContract("", "", ""), {}, 9, lambda local_rank: 0,
        prefixes=prefixes, warning_signal=WARNING_SIGNAL, warm=warm,
    )  # fmt: skip
    launcher = Launcher(spec, len(prefixes), directory, LauncherHooks(said.append))
    launcher.begin()
    await launcher.wait()
    if order["later"]:
        await _grow(launcher, order["later"])
    workers = []
    with ExitStack() as files:
        for rank, more in enumerate(order["envs"]):
            out, err = (files.enter_context(open(directory / f"{rank}.{end}", "wb")) for end in ("out", "err"))
            fault = {} if "PYTHONFAULTHANDLER" in os.environ else {"PYTHONFAULTHANDLER": "1"}
            env = worker_env(os.environ, {**fault, **more}, len(prefixes))
            workers.append(launcher.take(rank).release(env, out, err))
    codes = [await _end(child) for child in workers]
    await launcher.close()
    text = [[(directory / f"{rank}.{end}").read_text() for end in ("out", "err")] for rank in range(len(codes))]
    return {"said": said, "workers": [[code, *text[rank]] for rank, code in enumerate(codes)]}


async def _grow(launcher, modules):
    """Returns when all standbys are those of the successor."""
    launcher._first = False
    (template,) = launcher._templates
    grown, renew = asyncio.Event(), launcher.renew
    launcher.renew = lambda ranks: (renew(ranks), grown.set())  # the settled event is cleared before this one is set
    launcher._learned.found(modules)
    template.want((*template._modules, *((name, {}) for name in modules)))
    for event in (grown, launcher._settled):
        await asyncio.wait_for(event.wait(), BOUND_S)


async def _end(child):
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(child.pidfd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), BOUND_S)
    finally:
        loop.remove_reader(child.pidfd)
    return child.reap()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.load(sys.stdin)))))
