"""The command line of the minicluster, for people: what `scripts/minicluster` runs (standard library only)."""

import argparse
import shlex
import sys
from pathlib import Path

import minicluster_conf
import slurm_builds
from minicluster import MiniCluster

from nvrx_slurm.errors import ExitCode, NvrxError


def default_root():
    """~/.cache/nvrx-minicluster: every shell of this user finds it, and other users cannot make it first."""
    return Path.home() / ".cache" / "nvrx-minicluster"


def _exports(cluster):
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in cluster.env().items())


def _listed(processes):
    return ", ".join(f"{one.name}[{one.pid}]" for one in processes) or "nothing"


def _parser():
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=default_root(), help="where it lives (default: %(default)s)")
    parser = argparse.ArgumentParser(prog="minicluster", description="A private Slurm cluster on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", parents=[common], help="bring a cluster up and print the exports")
    up.add_argument("--nodes", type=int, default=4, help="1..64 (default: %(default)s)")
    up.add_argument("--cpus-per-node", type=int, default=16, help="as Slurm sees them (default: %(default)s)")
    up.add_argument("--kill-wait", type=int, default=30, help="seconds from SIGTERM to SIGKILL (default: %(default)s)")
    versions = ", ".join(slurm_builds.VERSIONS)
    up.add_argument("--slurm", default="", metavar="VERSION", help=f"{versions} (default: Debian's)")
    up.add_argument(
        "--variant", action="append", default=[], choices=sorted(minicluster_conf.VARIANTS), help="may be repeated"
    )
    commands.add_parser("down", parents=[common], help="end the cluster and all its jobs at once")
    commands.add_parser("status", parents=[common], help="one line per daemon and node")
    commands.add_parser("env", parents=[common], help='for: eval "$(scripts/minicluster env)"')
    for name, text in (("kill-node", "lose a node, all of it, at once"), ("restart-node", "bring a node back")):
        commands.add_parser(name, parents=[common], help=text).add_argument("node", help="n1, n2, ...")
    return parser


def _up(args):
    slurm_builds.install(args.slurm)
    cluster = MiniCluster(
        args.dir, args.nodes, args.cpus_per_node, args.kill_wait, slurm=args.slurm, variants=tuple(args.variant)
    ).up()
    print(f"# {args.nodes} nodes up in {args.dir}; end them with: scripts/minicluster down --dir {args.dir}")
    print(_exports(cluster))


def _down(args):
    try:
        cluster = MiniCluster.attach(args.dir)
    except NvrxError:
        cluster = MiniCluster(args.dir)  # no or a damaged state file: what a crash left is found by scanning
        if not cluster.scan():
            raise
    stray = cluster.down()
    print(f"down; killed beside the daemons: {_listed(stray)}")


def _run(args):
    if args.command == "up":
        return _up(args)
    if args.command == "down":
        return _down(args)
    cluster = MiniCluster.attach(args.dir)
    if args.command == "status":
        for name, state in cluster.status().items():
            print(f"{name:<10} {state}")
    elif args.command == "env":
        print(_exports(cluster))
    elif args.command == "kill-node":
        print(f"killed {_listed(cluster.kill_node(args.node))}")
    else:
        cluster.restart_node(args.node)
        print(f"{args.node} is back")


def main(argv=None):
    """Run one command; returns the exit code (0, or the error's, whose sentence went to stderr)."""
    try:
        _run(_parser().parse_args(argv))
    except NvrxError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(f"minicluster: {error}; check --dir.", file=sys.stderr)
        return int(ExitCode.FAILED)
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
