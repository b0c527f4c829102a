"""What the documents say is true of the code: snippets run, flags exist or are refused, tables and links agree."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import tutorialdoc
from test_tidy import our_files
from waits import WAIT_S

from nvrx_slurm.cli import toolbox
from nvrx_slurm.cli.options import nvrx_run_options, spelling
from nvrx_slurm.config.layers import SETTINGS, resolve
from nvrx_slurm.config.other_launchers import instead
from nvrx_slurm.config.settings import settings_of
from nvrx_slurm.config.submit import SubmitConfig
from nvrx_slurm.errors import ExitCode, UsageError
from nvrx_slurm.node.workers.worker_spec import worker_env

pytestmark = pytest.mark.process


REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
TEXTS = sorted(
    [*DOCS.rglob("*.md"), REPO / "README.md", REPO / "examples/README.md", REPO / "sbatch_templates/README.md"]
)
MIGRATING = (DOCS / "how-to/migrate-from-torchrun.md", DOCS / "how-to/migrate-from-nvrx.md")
STATUSES = {"same", "renamed", "no effect", "refused", "not needed"}
LAUNCHER = ["-m", "nvrx_slurm.cli.run", "--standalone", "--nproc-per-node", "2"]
BY_FLAG = {flag: item for item in SETTINGS.values() for flag in item.flags}
BY_VARIABLE = {name: item for item in SETTINGS.values() for name in item.env}


def where(path):
    return str(path.relative_to(REPO))


# --- reading Markdown -------------------------------------------------------------------------------------------------


class Fence(NamedTuple):
    """A fenced block: the words after the three backticks, its text, and where it begins."""

    path: Path
    line: int
    info: tuple[str, ...]
    text: str

    def __str__(self):
        return f"{where(self.path)}:{self.line}"


def fences(path):
    info = None
    begun, lines = 0, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif info is None:
            info, begun, lines = tuple(line[3:].split()), number, []
        else:
            yield Fence(path, begun, info, "\n".join(lines) + "\n")
            info = None
    assert info is None, f"{where(path)}:{begun}: a fence is not closed"


def tables(path):
    """Each table as rows of cells, the header first."""
    rows = []
    for line in [*path.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def code(cell):
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


FENCES = [fence for path in TEXTS for fence in fences(path)]
PYTHON = [fence for fence in FENCES if fence.info[:1] == ("python",)]
MARKED = [fence for fence in PYTHON if len(fence.info) > 1]


# --- snippets ---------------------------------------------------------------------------------------------------------


def test_python_snippets_are_python():
    for fence in PYTHON:
        ast.parse(fence.text, str(fence))
        assert fence.info[1:2] in ((), ("run",), ("launch",)), f"{fence}: neither `run` nor `launch FLAGS`"
    kinds = [fence.info[1] for fence in MARKED]
    assert kinds.count("run") >= 2 and kinds.count("launch") >= 3


@pytest.mark.parametrize(
    "fence", [pytest.param(f, id=str(f), marks=[pytest.mark.torch] * ("import torch" in f.text)) for f in MARKED]
)
def test_marked_snippets_run(fence, tmp_path):
    """`run`: by Python; `launch FLAGS`: by nvrx-run with these flags, two ranks on this machine."""
    script = tmp_path / "snippet.py"
    script.write_text(fence.text)
    run(script, [*LAUNCHER, *fence.info[2:]] if fence.info[1] == "launch" else [], clean_environment())


SHELL = [fence for fence in FENCES if fence.info == ("bash", "run")]
TRAINS = "import sys\nfor step in range(20):\n    print('step', step)\nsys.exit('4712' in sys.argv)\n"


@pytest.fixture(scope="module")
def log_tree(tmp_path_factory):
    """A folder as a reader has one: train.py, and what two jobs have left. The second one has failed."""
    place = tmp_path_factory.mktemp("reader")
    (place / "train.py").write_text(TRAINS)
    for name, module in (("nvrx", "nvrx_slurm.cli.toolbox"), ("nvrx-run", "nvrx_slurm.cli.run")):
        (place / "bin").mkdir(exist_ok=True)
        (place / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (place / "bin" / name).chmod(0o755)
    for job, code in (("4711", 0), ("4712", 1)):
        merged = place / "logs/%j/train.log"
        words = [*LAUNCHER, "--rdzv-id", job, "--ft-per-cycle-applog-prefix", str(merged), "train.py", job]
        done = subprocess.run(
            [sys.executable, *words], cwd=place, env=clean_environment(), capture_output=True, timeout=WAIT_S
        )
        assert done.returncode == code, done.stderr.decode()
    (place / "nvrx_logs/chain_20261125-101500_3f2a").write_text("4711\n4712\n")
    return place


def test_enough_shell_blocks_are_run():
    assert len(SHELL) >= 6 and len({fence.path for fence in SHELL}) >= 5


@pytest.mark.parametrize("fence", [pytest.param(fence, id=str(fence)) for fence in SHELL])
def test_shell_blocks_run(fence, log_tree):
    """`bash run`: in a folder with train.py, and the logs of the jobs 4711 and 4712. 3: a job has ended."""
    env = clean_environment()
    env["PATH"] = f"{log_tree / 'bin'}:{env['PATH']}"
    words = ["bash", "-uo", "pipefail", "-c", f"trap '[ $? = 3 ] || exit 99' ERR\n{fence.text}"]
    done = subprocess.run(words, cwd=log_tree, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode in (0, 3), done.stdout + done.stderr


def clean_environment():
    foreign = ("SLURM_", "TORCHELASTIC_", "FT_", "NVRX_", "PET_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return env | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}


def run(script, launcher, env):
    command = [sys.executable, *launcher, str(script)]
    done = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def lines_of(program):
    """The words after each `program` in shell blocks, up to the end of the command; none of lines with "..."."""
    for fence in FENCES:
        if fence.info[:1] not in (("bash",), ("sh",)):
            continue
        for line in fence.text.replace("\\\n", " ").splitlines():
            found = re.search(rf"(?:^|[\s/]){program} ([^|>]*)", line)
            if found and "..." not in line and not line.startswith("#"):
                yield fence, shlex.split(found[1], comments=True)


def test_command_lines_are_understood(capsys):
    command = nvrx_run_options(lambda resolved, script, args: pytest.fail("--print-config starts nothing"))
    for place, words in lines_of("nvrx-run"):
        with pytest.raises(SystemExit) as end:
            command.main(["--print-config", *words])
        assert end.value.code == 0, f"{place}: {capsys.readouterr().err}"


def test_commands_of_the_toolbox_are_understood():
    for place, words in lines_of("nvrx"):
        command, name = toolbox.main, "nvrx"
        while isinstance(command, click.Group) and words[:1] > ["0"]:  # neither the end nor an option
            name, command, words = command.resolve_command(click.Context(command), words)
        try:
            command.make_context(name, words)
        except (click.BadParameter, click.exceptions.Exit):
            pass  # of a job that is not here; --help
        except click.UsageError as error:
            pytest.fail(f"{place}: {error}")


@pytest.mark.matrix
@pytest.mark.torch
@pytest.mark.timeout(400)
def test_the_samples_of_the_tutorial_are_those_of_a_run():
    page = (DOCS / "tutorial/first-job.md").read_text()
    made = tutorialdoc.render(page)
    assert tutorialdoc.plain(made) == tutorialdoc.plain(page), "run scripts/lib/tutorialdoc.py"
    assert page.count("```console") >= 4


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(path):
    """What GitHub calls the headings of a file."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    wrong = []
    for path in TEXTS:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for name, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", text):
            there = (path.parent / name).resolve() if name else path
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                wrong.append(f"{where(path)}: {name}#{anchor}")
    assert wrong == []


MADE = ("share/nvrx_slurm", "benchmarks/results")  # by an installation, by a measurement


@pytest.mark.fast
def test_pages_name_only_what_is_here():
    """Paths of the repository exist, and no page cites a plan, a review or a number of a tracker."""
    top = "|".join(sorted(path.name for path in REPO.iterdir() if path.is_dir() and path.name[0] != "."))
    inside, outside = (
        re.compile(rf"`((?:{top})/[\w./-]+\w/?)`"),
        re.compile(r"\b(?:[Ss]eed 0\d\d|[Ff]inding [A-Z]\d)\b"),
    )
    for path in TEXTS:
        text = path.read_text()
        there = {name for name in inside.findall(text) if not name.startswith(MADE)}
        assert [name for name in there if not (REPO / name).exists()] == [], where(path)
        assert outside.findall(text) == [], where(path)


@pytest.mark.fast
def test_pages_are_short():
    """Beside tables and code, at most 1,500 words."""
    for path in TEXTS:
        prose = re.sub(r"^```.*?^```|^\|[^\n]*", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(prose.split()) <= 1500, where(path)


@pytest.mark.skipif(not (REPO / ".venv-docs/ready").exists(), reason="mkdocs is not here; scripts/docs installs it")
def test_the_site_is_built_with_its_manual_pages(tmp_path):
    done = subprocess.run(["scripts/docs", tmp_path], cwd=REPO, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (tmp_path / "man/man1").iterdir()}
    assert {"nvrx-run", "nvrx", "nvrx-status", "nvrx-health-run"} <= pages
    assert (tmp_path / "reference/metrics.html").exists()


# --- environment variables --------------------------------------------------------------------------------------------


def source_text():
    """All programs and scripts of ours but the tests."""
    programs = [path for path in our_files() if path.suffix in (".py", ".sh", ".sbatch", "")]
    inside = [path for path in programs if path.relative_to(REPO).parts[0] not in ("docs", "tests")]
    return "\n".join(path.read_text(errors="replace") for path in inside)


def migrating_rows(*headers):
    """(their names, our names, status, the row) of the migration tables whose first column has such a header."""
    for header, *rows in (table for path in MIGRATING for table in tables(path)):
        if header[0] not in headers:
            continue
        for row in rows:
            cells = dict(zip(header, row, strict=True))
            assert cells["status"] in STATUSES, row
            yield code(row[0]), code(cells.get("ours", "")), cells["status"], " | ".join(row)


def test_variables_exist():
    """NVRX_... and FT_... in the documents are read or set somewhere, or a migration page says that they are not."""
    variable = re.compile(r"\b(?:NVRX|FT)_[A-Z0-9_]*[A-Z0-9]\b")
    of_submit = {name for item in settings_of(SubmitConfig) for name in item.env}
    known = {*variable.findall(source_text()), *BY_VARIABLE, *of_submit}
    rows = migrating_rows("variable", "class")
    theirs = {name for names, _, status, _ in rows if status == "not needed" for name in names}
    assert len(theirs) > 10
    for path in TEXTS:
        unknown = set(variable.findall(path.read_text())) - known - (theirs if path in MIGRATING else set())
        assert unknown == set(), where(path)


# --- migrating -----------------------------------------------------------------------------------------------------

FLAG_ROWS = list(migrating_rows("torchrun", "`ft_launcher`"))
THEIR_FLAGS = {flag for theirs, _, _, _ in FLAG_ROWS for flag in theirs}


def agrees(item, name, status):
    if item is None:
        return status == ("refused" if instead(name.lstrip("-")) else "not needed")
    return status in ("same", "renamed", "no effect") and bool(item.no_effect) == (status == "no effect")


def test_flags_of_theirs():
    for theirs, ours, status, row in FLAG_ROWS:
        assert all(agrees(BY_FLAG.get(flag), flag, status) for flag in theirs), row
        known = [BY_FLAG.get(name) or BY_VARIABLE.get(name) for name in ours]
        assert None not in known, row


def test_all_flags_are_in_the_tables():
    """Whatever has a flag is somebody's, or in the sentence about flags that only we have."""
    sentence = re.search(r"^Flags that only we have:(.*?):", MIGRATING[1].read_text(), flags=re.MULTILINE | re.DOTALL)
    own = set(code(sentence[1]))
    assert own & THEIR_FLAGS == set() and own <= set(BY_FLAG) <= own | THEIR_FLAGS


@pytest.mark.torch
def test_all_of_torchruns_flags_are_in_the_tables():
    words = pytest.importorskip("torch.distributed.run").get_args_parser()._option_string_actions
    theirs = {"--" + spelling(word[2:]) if word.startswith("--") else word for word in words}
    assert len(theirs) > 20 and theirs - THEIR_FLAGS == {"-h", "--help"}


def test_rdzv_conf_keys():
    for key, status in ((key, status) for keys, _, status, _ in migrating_rows("key") for key in keys):
        flags = {"rdzv_conf": f"{key}=" + ("false" if key in ("is_host", "use_libuv") else "7")}
        if status == "refused":
            with pytest.raises(UsageError, match=f"{key} is not supported"):
                resolve(flags, {})
        else:
            assert ("no effect" in " ".join(resolve(flags, {}).notes)) == (status == "no effect"), key


def test_variables_that_workers_get(tmp_path):
    """The section names exactly what a worker has and the launcher had not."""
    script = tmp_path / "names.py"
    script.write_text("import os; open('names.' + os.environ['RANK'], 'w').write(' '.join(os.environ))")
    names = ("OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    env = {name: value for name, value in clean_environment().items() if name not in names}
    run(script, LAUNCHER, env)
    page = (DOCS / "reference/environment.md").read_text()
    section = page.partition("## Variables that workers get\n")[2].partition("\n#")[0]
    documented = {name for name in code(section) if name == name.upper()} - {
        "NVRX_RESUME_BEFORE",
        "NVRX_RESUME_FROM",
        "NVRX_CURRENT_CYCLE_INFO",
        "NVRX_BOARD",
        "NVRX_KEEPER_BYTES",
    }  # seldom there
    assert documented == set((tmp_path / "names.1").read_text().split()) - set(env)


def test_what_the_front_tells_its_tasks_no_rank_inherits():
    rows = (DOCS / "reference/environment.md").read_text().splitlines()
    cells = [row.split("|") for row in rows if "| the front |" in row]
    told = {name for row in cells for name in code(row[1])}
    assert len(told) > 5 and worker_env(dict.fromkeys((*told, "MINE"), "x"), {}, 1).keys() & {*told, "MINE"} == {"MINE"}


def test_variables_of_theirs():
    source = source_text()
    variables = [(name, status) for theirs, _, status, _ in migrating_rows("variable") for name in theirs]
    assert len(variables) >= 40
    for name, status in variables:
        item = BY_VARIABLE.get(name)
        if item is not None:
            assert agrees(item, name, status), name
        else:
            assert bool(re.search(rf"""["']{name}["']""", source)) == (status == "same"), name


# --- classes ----------------------------------------------------------------------------------------------------------


def find(name):
    """Whether `Class`, `Class.method` or `nvrx_slurm.module.name` exists."""
    first, *rest = name.split(".")
    if first == "nvrx_slurm":
        return hasattr(importlib.import_module(".".join([first, *rest[:-1]])), rest[-1])
    for module_name in ("fault_tolerance", "ptl_resiliency", "attribution.straggler"):
        module = importlib.import_module(f"nvrx_slurm.{module_name}")
        if first in getattr(module, "__all__", vars(module)):
            found = getattr(module, first)
            return all(hasattr(found, part) or hasattr(found(), part) for part in rest)
    return False


LIGHTNING = pytest.mark.xdist_group("lightning")  # which one worker imports
CLASS_ROWS = [
    pytest.param(row, id=row[0][0], marks=[LIGHTNING] * ("Callback" in row[0][0])) for row in migrating_rows("class")
]


@pytest.mark.parametrize("row", CLASS_ROWS)
def test_classes_of_theirs(row):
    theirs, ours, status, _ = row
    if any("Callback" in name for name in theirs) and importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed (extra: lightning)")
    assert {name: find(name) for name in theirs} == dict.fromkeys(theirs, status == "same")
    assert [name for name in ours if not find(name)] == []


# --- exit codes ----------------------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_is_the_one_in_errors():
    header, *rows = next(table for table in tables(DOCS / "reference/exit-codes.md") if table[0][0] == "code")
    assert header[:3] == ["code", "name", "meaning"]
    assert [(row[0], row[1].strip("`")) for row in rows if row[0] != "128+n"] == [(f"{c:d}", c.name) for c in ExitCode]
