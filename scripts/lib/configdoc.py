"""Writes docs/reference/configuration.md from the settings: `python scripts/lib/configdoc.py FILE`.

A test compares the file with `render()`, so the document can never be behind the code.
"""

import sys
from pathlib import Path

from nvrx_slurm.config.layers import SETTINGS
from nvrx_slurm.config.settings import by_group, settings_of, shown
from nvrx_slurm.config.submit import SubmitConfig

HEAD = """# Configuration

<!-- Generated: python scripts/lib/configdoc.py docs/reference/configuration.md -->

Every setting of `nvrx-run`, from the one dataclass tree in `nvrx_slurm/config/`.

- **Order:** flags, then environment, then the YAML file of `--ft-cfg-path`, then defaults.
  `nvrx-run --print-config` shows each value and where it came from.
- **Spelling of flags:** `-` and `_` are the same everywhere. `--ft-param-NAME` is `--ft-NAME`.
- **Environment:** the first variable listed wins; an empty one counts as unset; a misspelt `NVRX_FT_...` is an error.
- **YAML:** one `fault_tolerance:` section, at any depth of the file (UTF-8, at most 256 KiB). An unknown key, a second
  section or a key given twice is an error.
- **Values:** booleans are true/false, 1/0, yes/no, on/off in any case. Times are seconds. `none` means no limit.
- Wrong input ends with exit code 2 and one sentence, before anything is started.
"""

COLUMNS = "| flag | also | environment | YAML key | default | meaning |\n|---|---|---|---|---|---|"


def render():
    """The whole document as Markdown."""
    parts = [HEAD, *(_table("##", *group) for group in by_group(SETTINGS.values()).items())]
    parts.append("## nvrx submit\n\nFlags of `nvrx submit`, which takes those above, too.\n")
    parts += [_table("###", *group) for group in by_group(settings_of(SubmitConfig)).items()]
    return "\n".join(parts)


def _table(level, group, items):
    return "\n".join([f"{level} {group}\n", COLUMNS, *map(_row, items), ""])


def _row(item):
    flag, *aliases = item.flags or ("",)
    value = "" if item.form == "switch" or not flag else f" {item.kind.metavar}"
    yaml_key = item.name if item.section == "ft" else ""
    cells = [_code(flag + value), ", ".join(map(_code, aliases)), ", ".join(map(_code, item.env)), _code(yaml_key)]
    return "| " + " | ".join([*cells, _code(shown(item, item.default)), item.help.replace("|", "\\|")]) + " |"


def _code(text):
    return f"`{text}`".replace("|", "\\|") if text else ""


def main():
    """Write to the file named as the only argument, or to stdout."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
