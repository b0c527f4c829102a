"""`python -I -m nvrx_slurm.health --when prolog`: the checks for programs (Slurm's hooks, the agent): one JSON line.

With `--serve` it stays and answers questions, see `check_server`.

The same as `nvrx health run --json`, without click: it starts in a fraction of the time. `-I` because root must not
import modules of the current directory.
"""

from __future__ import annotations

import signal
import sys

from nvrx_slurm.child.bounded_process import JOB_SIGNALS
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import outcome, policy, runner
from nvrx_slurm.health.check import CONTEXTS, NodeView


def examine_node(plan: policy.Selection, sysroot: str, state_dir: str = "") -> outcome.Report:
    """Run the selected checks. To be called in a process without threads."""
    result = runner.run(
        plan.checks, NodeView(sysroot, state_dir=state_dir), plan.expected, plan.deadline_s
    )
    return outcome.Report(
        plan.node, plan.when, result.findings, [*plan.notes, *result.notes], result.seconds
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit code (0 pass, 1 fail, 2 usage, 3 unknown)."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -I -m nvrx_slurm.health", allow_abbrev=False)
    parser.add_argument("--when", choices=CONTEXTS, default="manual")
    for name in ("--only", "--include", "--skip", "--watch"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--expect", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--config")
    parser.add_argument("--sysroot", default="/")
    parser.add_argument("--node", default="")
    parser.add_argument("--deadline", type=float, dest="deadline_s")
    # an agent's own, as batch jobs have no /run/user/UID
    parser.add_argument("--state-dir", default="")
    parser.add_argument("--serve", action="store_true")  # see `check_server`
    # with --serve: only GPU memory; no site file is read
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--interval", type=float, default=30.0)
    given = vars(parser.parse_args(argv))
    state_dir, serve, no_checks, interval_s = (
        given.pop(n) for n in ("state_dir", "serve", "no_checks", "interval")
    )
    if serve:
        # Slurm sends them to the whole step; it ends at the end of its questions
        for signum in JOB_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
    else:
        runner.stop_on_sigterm()
    try:
        if not 0 < interval_s <= policy.MAX_DEADLINE_S:
            raise UsageError(
                f"--interval {interval_s:g}: must be seconds > 0 and <= {policy.MAX_DEADLINE_S:g}"
            )
        given["expect"] = policy.assignments(given["expect"])
        when = given["when"]
        nothing = policy.Selection(policy.node_name(), when, [], {}, policy.DEADLINES_S[when])
        plan = nothing if no_checks else policy.select(**given)
    except UsageError as error:
        print(f"nvrx health: {error}", file=sys.stderr)
        return outcome.EXIT_USAGE
    if serve:
        from nvrx_slurm.health.check_server import CheckServer
        from nvrx_slurm.health.checks import node_service

        if plan.expected.get("node_service"):
            node_service.preload()  # gRPC's import takes long
        CheckServer(plan, NodeView(given["sysroot"], state_dir=state_dir), interval_s).serve()
        return outcome.EXIT_PASS
    found = examine_node(plan, given["sysroot"], state_dir)
    print(found.as_json(), flush=True)
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
