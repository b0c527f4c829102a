"""The names that docs/reference/public.md promises to keep: `python scripts/lib/publicnames.py tests/data/public.txt`.

The file has those of the last release, one a line: its kind, the name, and other names of the same thing. A test
wants a line in the top section of CHANGELOG.md for each name that differs from it; scripts/dev/release writes it anew.
"""

import asyncio
import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import click
from click.testing import CliRunner

from nvrx_slurm.cli.ending import complete_result
from nvrx_slurm.cli.toolbox import main as nvrx
from nvrx_slurm.config.cores import agent_settings, coordinator_settings
from nvrx_slurm.config.layers import SETTINGS, Config
from nvrx_slurm.config.settings import settings_of
from nvrx_slurm.config.submit import SubmitConfig
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.events import JobOver
from nvrx_slurm.core.coordinator.status import JobLabels
from nvrx_slurm.core.samples import METRICS, kind_of
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.health import registry
from nvrx_slurm.node.output.result import content, write_result
from nvrx_slurm.node.publish.publisher import Publisher
from nvrx_slurm.node.publish.status_file import StatusFile
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.types import FaultKind, RankFault

REPO = Path(__file__).resolve().parents[2]
MODULES = ("fault_tolerance", "checkpoint", "ptl_resiliency", "testing", "attribution.straggler")
IN_PROCESS = """
abort attribution completion exception finalize health_check initialize nested_restarter rank_assignment state store
terminate
"""
SHOWN = ("status --json 7", "list --json", "why --json 7", "goodput --json 7", "goodput --json --since 1d")
_TOP = re.compile(r"^## \[.*?(?=^## \[|\Z)", re.MULTILINE | re.DOTALL)


def names():
    """All public names, sorted."""
    return sorted({*_settings(), *_commands(), *_imports(), *json_keys(), *_others()})


def unsaid(released, changelog):
    """Names that were added, removed or changed since `released`, and that the top section does not have in code."""
    told = _TOP.search(changelog)
    assert told, "CHANGELOG.md has a section"
    code = " ".join(re.findall(r"`([^`]+)`", told[0]))
    changed = sorted({*names()} ^ {*released})
    return [line for line in changed if not re.search(rf"(?<![\w-]){re.escape(line.split()[1])}(?![\w-])", code)]


def _settings():
    for item in (*SETTINGS.values(), *settings_of(SubmitConfig)):
        key = [f"fault_tolerance.{item.name}"] if item.section == "ft" else []
        yield " ".join(["setting", *item.flags, *item.env, *key])


def _commands():
    todo = [click.Context(nvrx, info_name="nvrx")]
    for ctx in todo:
        command = ctx.command
        if isinstance(command, click.Group):
            subs = ((name, command.get_command(ctx, name)) for name in command.list_commands(ctx))
            todo += [click.Context(sub, ctx, name) for name, sub in subs if sub]
        path = ctx.command_path.replace(" ", "-")
        yield f"command {path}"
        for option in command.params if ctx.info_name != "submit" else ():
            if isinstance(option, click.Option) and not option.hidden:
                yield f"option {option.opts[0]} {path}"


def _imports():
    for name in MODULES:  # which may need packages that are not here
        place = REPO / "nvrx_slurm" / name.replace(".", "/")
        text = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
        for member in re.findall(r'"(\w+)"', text.partition("\n__all__ = [")[2].partition("]")[0]):
            yield f"import {member} nvrx_slurm.{name}"
    yield "import FaultToleranceCallback nvrx_slurm.huggingface"
    for member in ("Wrapper", "CallWrapper", "Compose", "State", "FrozenState", "Mode"):
        yield f"import {member} nvrx_slurm.inprocess"
    for name in IN_PROCESS.split():
        module = importlib.import_module(f"nvrx_slurm.inprocess.{name}")
        for member, value in vars(module).items():
            is_defined_there = getattr(value, "__module__", "").endswith(f".{name}")
            if is_defined_there and isinstance(value, type) and not member.startswith("_"):
                yield f"import {member} nvrx_slurm.inprocess.{name}"


def json_keys():
    """The outer keys of JSON, as the code writes it of a job that runs, was killed by Slurm, and has ended."""
    slurm = MagicMock(restart_count=0)
    slurm.control.slurm.job.return_value = SimpleNamespace(state="CANCELLED", reason="", restarts=0)
    cause = RankFault(FaultKind.EXIT, "n1", 0, 0)
    with tempfile.TemporaryDirectory() as tree:
        run = RunDir(Path(tree), "7", "r0")
        run.path.mkdir(parents=True)
        asyncio.run(_tell(run.status))
        yield from _read(run)
        complete_result(slurm.control, slurm, run, 143, 0.0, print)
        yield from _read(run)
        write_result(run.result, content(JobOver(143, "", cause), None))
        complete_result(slurm.control, slurm, run, 143, 0.0, print)
        yield from _read(run)


async def _tell(status):
    config = Config()
    core = Coordinator(coordinator_settings(config, agent_settings(config), 0.0), 0.0)
    one = Publisher(core, JobLabels("7", "r0"), "", None, lambda: None, None, [StatusFile(status)])
    one.publish()
    await one.close()


def _read(run):
    for file in run.path.glob("*.json"):
        yield from (f"json {key} {file.name}" for key in json.loads(file.read_text()))
    for words in SHOWN:
        told = CliRunner(env={"PET_LOG_DIR": str(run.log_dir)}).invoke(nvrx, words.split()).stdout
        if told:  # else nothing is known yet
            found = json.loads(told)
            for one in (found, *found.get("jobs", {}).values()):
                yield from (f"json {key} nvrx-{words.split()[0]}" for key in one)


def _others():
    page = (REPO / "docs/reference/environment.md").read_text()
    yield from (f"variable {name}" for name in re.findall(r"`(NVRX_\w+)`", page))
    yield from (f"exit-code {code.name} {code.value}" for code in ExitCode)
    yield from (f"metric {name} {kind_of(name)}" for name in METRICS)
    for check in registry.built_in().values():
        yield f"check {check.name}"
        yield from (f"expected {setting.name} {check.name}" for setting in check.settings)


def main():
    """Write the file named as the only argument."""
    Path(sys.argv[1]).write_text("\n".join(names()) + "\n")


if __name__ == "__main__":
    main()
