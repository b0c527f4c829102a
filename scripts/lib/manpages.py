"""Writes the manual pages of `nvrx-run` and `nvrx` from their commands: `python scripts/lib/manpages.py FOLDER`.

Each command has a page: nvrx-run.1, nvrx.1, nvrx-status.1, nvrx-health-run.1 and so on. `scripts/docs` writes them to
site/man/man1; read one with `man -l`.
"""

import inspect
import re
import sys
from pathlib import Path

import click

from nvrx_slurm import __version__
from nvrx_slurm.cli.options import SettingsCommand
from nvrx_slurm.cli.run import main as nvrx_run
from nvrx_slurm.cli.toolbox import main as nvrx

_NAME_CHARS = 100


def pages():
    """The text (groff) of each page by its file name."""
    found = [*_with_subcommands(_context(nvrx_run, "nvrx-run", None)), *_with_subcommands(_context(nvrx, "nvrx", None))]
    names = [_name(ctx) for ctx in found]
    return {f"{_name(ctx)}.1": "\n".join(_page(ctx, names)) + "\n" for ctx in found}


def _context(command, name, parent):
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _with_subcommands(ctx):
    yield ctx
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            assert command is not None
            yield from _with_subcommands(_context(command, name, ctx))


def _name(ctx):
    return ctx.command_path.replace(" ", "-")


def _page(ctx, names):
    command, name = ctx.command, _name(ctx)
    yield f'.TH {_text(name.upper())} 1 "" "nvrx_slurm {__version__}" "nvrx_slurm"'
    what = command.get_short_help_str(_NAME_CHARS).partition(":")[0].rstrip(".")
    yield f".SH NAME\n{_text(name)} \\- {_text(what)}"
    yield f".SH SYNOPSIS\n.B {_text(ctx.command_path)}\n{_text(' '.join(command.collect_usage_pieces(ctx)))}"
    yield ".SH DESCRIPTION"
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        yield f".PP\n{_text(' '.join(paragraph.split()))}"
    for title, rows in _options(ctx).items():
        yield f'.SH "{_text(title.upper())}"'
        for flag, text in rows:
            yield f".TP\n.B {_text(flag)}\n{_text(text) or '.br'}"
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        for sub in command.list_commands(ctx):
            one = command.get_command(ctx, sub)
            assert one is not None
            yield f".TP\n.BR {_text(f'{name}-{sub}')} (1)\n{_text(one.get_short_help_str(_NAME_CHARS))}"
    others = [other for other in names if other != name and other in ("nvrx", "nvrx-run", name.rpartition("-")[0])]
    yield ".SH SEE ALSO\n" + ",\n".join(f".BR {_text(other)} (1)" for other in others).replace(",\n", " ,\n")


def _options(ctx):
    if isinstance(ctx.command, SettingsCommand):
        return ctx.command.rows(True)
    options = [param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option)]
    return {"options": [record for option in options if (record := option.get_help_record(ctx))]}


def _text(text):
    """`text` for groff: nothing in it is a request."""
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"))


def main():
    """Write all pages to the folder named as the only argument."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
