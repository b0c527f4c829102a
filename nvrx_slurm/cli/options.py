"""The commands whose options are the settings of `nvrx_slurm.config`: nothing is declared twice.

`nvrx_run_options` turns a function into `nvrx-run`; values pass as text to `config.resolve`, which alone judges them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from nvrx_slurm import __version__
from nvrx_slurm.config import other_launchers
from nvrx_slurm.config.layers import SETTINGS, Resolved, resolve
from nvrx_slurm.config.settings import Declaration, by_group, shown
from nvrx_slurm.errors import ExitCode, NvrxError

PROGRAM = "nvrx-run"
# What --help shows; --help-all shows all.
USUAL = {
    "nnodes",
    "nproc_per_node",
    "node_rank",
    "standalone",
    "module",
    "spares",
    "until_done",
    "rdzv_endpoint",
    "max_restarts",
    "ft_warn_before_end",
    "ft_checkpoint_iteration_file",
    "ft_rank_heartbeat_timeout",
    "ft_rank_section_timeouts",
    "log_dir",
    "redirects",
    "tee",
    "ft_cfg_path",
    "ft_notify",
    "print_config",
    "dry_run",
}
_EVERY = "nvrx_slurm.help_all"  # in the context's meta

# (configuration, training script, its arguments) -> exit code
Body = Callable[[Resolved, str, tuple[str, ...]], int]
# (configuration, values of the options that were given, training script or "", its arguments) -> exit code
OnFlags = Callable[[Resolved, dict[str, Any], str, tuple[str, ...]], int]


def spelling(name: str) -> str:
    """The one form of an option's name: dashes for underscores, `ft-` for the older `ft-param-`."""
    dashed = name.replace("_", "-")
    return "ft-" + dashed.removeprefix("ft-param-") if dashed.startswith("ft-param-") else dashed


class SettingsCommand(click.Command):
    """A command `NAME [OPTIONS] SCRIPT [ARGS]` whose options are settings, by groups. `run` returns its exit code.

    It answers --print-config itself.
    """

    def __init__(
        self, name: str, run: OnFlags, settings: Mapping[str, Declaration], help: str | None
    ) -> None:
        context = {
            "help_option_names": ["-h", "--help"],
            "allow_interspersed_args": False,
            "token_normalize_func": spelling,
            "max_content_width": 120,
        }
        params = [
            *(_option(item) for item in settings.values() if item.flags),
            click.Argument(
                ["script"], required=False, metavar="SCRIPT", type=click.Path(readable=False)
            ),
            click.Argument(["script_args"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_help_all,
            ),
        ]
        super().__init__(name, context, params=params, help=help)
        self.settings = settings
        self._run = run
        click.version_option(__version__, message="nvrx_slurm %(version)s")(self)

    def invoke(self, ctx: click.Context) -> int:
        """Run with what stands on the command line: click must not mix in defaults of its own."""
        given = (
            key
            for key in ctx.params
            if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE
        )
        flags = {key: ctx.params[key] for key in given if key in self.settings}
        resolved = resolve({key: flags[key] for key in flags if key in SETTINGS}, os.environ)
        if resolved.config.launch.print_config:
            click.echo(print_config(resolved))
            return ExitCode.OK
        script = ctx.params["script"] or ""
        return self._run(resolved, flags, script, tuple(ctx.params["script_args"]))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by group: the usual ones, or all."""
        for group, rows in self.rows(_EVERY in ctx.meta).items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=34)
        formatter.write_paragraph()
        formatter.write_text(
            "docs/reference/configuration.md lists all, with environment variables and YAML keys."
        )

    def rows(self, every: bool) -> dict[str, list[tuple[str, str]]]:
        """Flag and meaning by group. Without `every` only the usual flags of nvrx-run, and all that it has not."""
        items = [one for one in self.settings.values() if one.flags]
        usual = [one for one in items if every or one.key in USUAL or one.key not in SETTINGS]
        rows = {
            group: [_help_row(one, every) for one in some]
            for group, some in by_group(usual).items()
        }
        more = f"Show all {len(items)} flags, torchrun's and ft_launcher's included."
        rows["Other"] = [
            ("-h, --help", "Show the usual flags."),
            ("--help-all", more),
            ("--version", "The version."),
        ]
        return rows


class RunCommand(SettingsCommand):
    """A command whose errors are one sentence on stderr and exit code 2."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> NoReturn:
        """Run and exit the process: the body's code, 2 for wrong input, the error's own code for other NvrxErrors."""
        extra.update(standalone_mode=False, prog_name=PROGRAM)
        try:
            code = super().main(args, **extra)
        except click.ClickException as error:
            click.echo(f"{PROGRAM}: {_sentence(error)}", err=True)
            code = ExitCode.USAGE
        except NvrxError as error:
            click.echo(f"{PROGRAM}: {error}", err=True)
            code = error.exit_code
        except click.Abort:
            code = 130
        sys.exit(int(code or 0))


def _option(item: Declaration) -> click.Option:
    """The option of a setting; its value stays text."""
    extra: dict[str, Any] = (
        {"is_flag": True} if item.form == "switch" else {"metavar": item.kind.metavar, "type": str}
    )
    if item.form == "repeat":
        extra["multiple"] = True
    return click.Option([item.key, *item.flags], default=None, help=item.help, **extra)


def _help_all(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[_EVERY] = True
        click.echo(ctx.get_help())
        ctx.exit()


def _help_row(item: Declaration, every: bool) -> tuple[str, str]:
    short = [flag for flag in item.flags if not flag.startswith("--")]
    value = "" if item.form == "switch" else f" {item.kind.metavar}"
    default = shown(item, item.default)
    told = item.form == "switch" or "Default:" in item.help or default in ("", "none")
    text = (
        item.help
        if every or "Default:" in item.help
        else item.help.partition(". ")[0].rstrip(".") + "."
    )
    return ", ".join([*short, item.flags[0]]) + value, text if told else f"{text} [{default}]"


def _sentence(error: click.ClickException) -> str:
    """What was wrong and what to do, as one sentence."""
    if not isinstance(error, click.NoSuchOption):
        return " ".join(error.format_message().split()).rstrip(".") + f"; see {PROGRAM} --help-all"
    advice = other_launchers.instead(error.option_name.lstrip("-"))
    if not advice and error.possibilities:
        advice = f"; did you mean {error.possibilities[0]}?"
    advice = advice or f"; see {PROGRAM} --help-all (the script's own flags go after it)"
    return f"{error.option_name} is not a flag of {PROGRAM}{advice}"


def nvrx_run_options(body: Body) -> click.Command:
    """Make the `nvrx-run` command of `body(resolved, script, script_args) -> exit code`.

    Its docstring is the head of `--help`. Everything after the script belongs to the script. A missing script is an
    error before `body` is called.
    """

    def run(resolved: Resolved, _: object, script: str, args: tuple[str, ...]) -> int:
        if not script:
            raise click.UsageError(
                "no training script was given; write it after the flags, as in nvrx-run train.py"
            )
        return body(resolved, script, args)

    return RunCommand(PROGRAM, run, SETTINGS, body.__doc__)


def print_config(resolved: Resolved) -> str:
    """The table of `--print-config`: name, value and origin of every setting, then the notes."""
    rows = [("setting", "value", "from")]
    for item in SETTINGS.values():
        value = shown(item, getattr(getattr(resolved.config, item.section), item.name))
        rows.append((item.key, value, str(resolved.origins[item.key])))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in resolved.notes)])
