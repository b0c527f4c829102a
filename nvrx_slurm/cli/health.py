"""`nvrx health`: run the checks of this node, list and explain them, write a site file. For people; programs take
`python -I -m nvrx_slurm.health`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy
from nvrx_slurm.health.check import CONTEXTS, Check

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _begun(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Health checks whose names begin like this, with what each reads."""
    from click.shell_completion import CompletionItem

    from nvrx_slurm.health.registry import built_in

    return [
        CompletionItem(name, help=check.reads)
        for name, check in built_in().items()
        if name.startswith(begun)
    ]


_CONFIG = click.option(
    "--config", metavar="FILE", help=f"The site file (default: {policy.DEFAULT_CONFIG})."
)
_SYSROOT = click.option(
    "--sysroot", metavar="DIR", default="/", help="Where the node's /proc and /sys are."
)
_NODE = click.option(
    "--node",
    metavar="NAME",
    default="",
    help="The node's name in the site file (default: Slurm's).",
)
_CHECKS: Any = {"metavar": "NAME", "multiple": True, "shell_complete": _begun}
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON on one line, for machines.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def health() -> None:
    """Health checks of this node."""


@health.command()
@click.option(
    "--when",
    type=click.Choice(CONTEXTS),
    default="manual",
    help="Checks of this context (default: manual).",
)
@click.option("--only", **_CHECKS, help="Only this check; can be repeated.")
@click.option("--skip", **_CHECKS, help="Not this check; can be repeated.")
@_JSON
@click.option(
    "--all", "everything", is_flag=True, help="Also show checks that do not apply to this node."
)
@click.option(
    "--expect",
    metavar="NAME=VALUE",
    multiple=True,
    help="Goes over the site file; can be repeated.",
)
@click.option("--deadline", type=float, metavar="SECONDS", help="For all together.")
@_NODE
@_CONFIG
@_SYSROOT
def run(
    when: str, as_json: bool, everything: bool, sysroot: str, deadline: float | None, **given: Any
) -> None:
    """Run the checks, side by side.

    Exit code: 0 pass, 1 fail, 2 usage, 3 unknown. A failure of which the site only wants to be warned is a pass.
    """
    from nvrx_slurm.health import runner
    from nvrx_slurm.health.__main__ import examine_node

    runner.stop_on_sigterm()
    expect = policy.assignments(given.pop("expect"))
    plan = policy.select(when, sysroot=sysroot, deadline_s=deadline, expect=expect, **given)
    found = examine_node(plan, sysroot)
    for note in found.notes:
        click.echo(f"nvrx health: {note}", err=True)
    click.echo(found.as_json() if as_json else found.table(everything))
    sys.exit(found.exit_code)


@health.command(name="list")
@_JSON
@_NODE
@_CONFIG
@_SYSROOT
def list_checks(as_json: bool, config: str | None, sysroot: str, node: str) -> None:
    """List the checks, with what each reads and when it fails.

    Also its time budget, and where and how it runs on this node.
    """
    rules = policy.read_rules(config, sysroot, node)
    if as_json:
        click.echo(json.dumps([_plain(check, rules) for check in rules.checks.values()]))
        return
    for check in rules.checks.values():
        how = [f"{check.budget_s:g} s", ",".join(check.contexts) or "nowhere"]
        how += [f"lane {check.group}"] if check.group else []
        how += ["root"] if check.needs_root else []
        click.echo(f"{check.name}  ({'; '.join(how)})")
        click.echo(f"    reads {check.reads}\n    {check.fails}")


def _plain(check: Check, rules: policy.Rules) -> dict[str, Any]:
    """The check as plain data, for machines. `lane` (its group): null = a process of its own."""
    names = (
        "name",
        "reads",
        "fails",
        "contexts",
        "budget_s",
        "needs_root",
        "on_fail",
        "on_unknown",
    )
    expects = {setting.name: rules.expected[setting.name] for setting in check.settings}
    return {
        **{name: getattr(check, name) for name in names},
        "lane": check.group or None,
        "expects": expects,
    }


@health.command()
@click.argument("name", shell_complete=_begun)
@_JSON
@_NODE
@_CONFIG
@_SYSROOT
def explain(name: str, as_json: bool, config: str | None, sysroot: str, node: str) -> None:
    """All about the check NAME, with what is expected of this node."""
    from nvrx_slurm.health.registry import require_known

    rules = policy.read_rules(config, sysroot, node)
    require_known([name], rules.checks, "nvrx health explain")
    check = rules.checks[name]
    told = {"node": rules.node, **_plain(check, rules)}
    if as_json:
        click.echo(json.dumps(told))
        return
    settings = {setting.name: f"  ({setting.help})" for setting in check.settings}
    expects = told.pop("expects")
    for label, value in {**told, **expects}.items():
        text = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
        click.echo(f"{label:16} {'-' if text in (None, '') else text}{settings.get(label, '')}")


@health.command()
@click.option(
    "--output", metavar="FILE", help="Where to write it; must not exist (default: the terminal)."
)
@_NODE
@_SYSROOT
def init(output: str | None, node: str, sysroot: str) -> None:
    """Write a first site file from what this node, a good one, has now."""
    from nvrx_slurm.health.init import site_file
    from nvrx_slurm.health.runner import stop_on_sigterm

    stop_on_sigterm()
    text, notes = site_file(node, sysroot)
    for note in notes:
        click.echo(
            f"nvrx health init: not written down, since it could not be read: {note}", err=True
        )

    try:
        with click.open_file(output or "-", "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(
            f"--output {output}: {error.strerror}; choose another file or remove it"
        ) from None


@health.command()
@_SYSROOT
def ack(sysroot: str) -> None:
    """Let the XIDs in the kernel log count no more. For root.

    It is for a repair without a reboot.
    """
    from nvrx_slurm.health.check import NodeView
    from nvrx_slurm.health.checks import kernel_log
    from nvrx_slurm.system.hardware import Absent

    try:
        count = kernel_log.acknowledge(NodeView(sysroot))
    except (OSError, Absent) as error:
        raise UsageError(f"the kernel log cannot be acknowledged: {error}") from None
    click.echo(f"{count} XIDs and SXIDs are acknowledged")


@health.command()
@click.option("-o", "--output", metavar="FILE", required=True, help="Where to write it.")
def bundle(output: str) -> None:
    """Write the hooks and all they need but Python into one file.

    It has this package, too, and `python3 -I -S` executes it.
    """
    from nvrx_slurm.health import bundle as whole

    size_bytes = whole.write(output)
    click.echo(
        f"{output}: {size_bytes / 2**20:.1f} MiB; on a node: python3 -I -S {output} health install DIR"
    )


@health.command()
@click.argument("folder", metavar="DIR")
def install(folder: str) -> None:
    """Write Slurm's hooks into DIR. For root.

    Where DIR has no hooks.conf, it gets one for this Python.
    """
    from nvrx_slurm.health import bundle as whole

    is_new = whole.install(folder)
    click.echo("" if is_new else f"{folder}/hooks.conf was there and is kept", nl=not is_new)
    click.echo(
        f"slurm.conf: Prolog={folder}/prolog Epilog={folder}/epilog HealthCheckProgram={folder}/healthcheck"
    )


@health.command()
@click.option("--config", metavar="FILE", required=True, help="Its settings, in YAML.")
@_SYSROOT
def serve(config: str, sysroot: str) -> None:
    """Answer nvhcd health check calls on a Unix socket.

    It asks a script of the site or our own checks, and ends with SIGTERM.
    """
    from nvrx_slurm.health.service import daemon as nvhcd_daemon

    sys.exit(nvhcd_daemon.main(config, sysroot))
