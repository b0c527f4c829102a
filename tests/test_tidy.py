"""What a reviewer would have to say again and again: sizes, layers, owners of imports, things that are never done."""

import ast
import configparser
import gc
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fast, pytest.mark.xdist_group("tidy")]  # on one worker, which parses each file once

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "nvrx_slurm"
GENERATED = {PACKAGE / f"{name}_pb2.py" for name in ("control/control", "health/service/nvhcd", "logs/nvrx_logs")}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_NESTING = 500, 70, 5  # each: below this
MAX_CODE_LINES = 300  # of a file of the package, without blanks, comments and docstrings

# Who may import whom. `testing` may import anything.
LAYERS = {
    "__init__": set(),
    "errors": set(),
    "declared": set(),
    "records": {"declared"},
    "types": {"declared", "records"},
    "codec": {"declared", "errors"},
    "core": {"__init__", "codec", "declared", "types", "errors"},
    "config": {"__init__", "declared", "types", "errors", "core"},
}
LAYERS["system"] = LAYERS["config"] | {"config", "codec"}
LAYERS["child"] = LAYERS["system"] | {"system"}
LAYERS["slurm"] = LAYERS["control"] = LAYERS["child"] | {"child"}
# A tool of the system (a scheduler's, a file's) may be used by the edge beside it, but control and slurm stay apart.
LAYERS["health"] = LAYERS["control"] | {"control", "slurm"}
LAYERS["monitor"] = LAYERS["logs"] = LAYERS["health"]
LAYERS["checkpoint"] = LAYERS["control"] | {"control", "monitor", "records"}  # keepers speak TLS as agents do
LAYERS["attribution"] = LAYERS["logs"] | {"logs", "health", "monitor"}
LAYERS["fault_tolerance"] = LAYERS["monitor"] | {"monitor"}
LAYERS["ptl_resiliency"] = LAYERS["huggingface"] = {"checkpoint", "fault_tolerance", "monitor", "system"}
LAYERS["node"] = LAYERS["monitor"] | {"monitor", "health", "fault_tolerance", "logs", "attribution", "checkpoint"}
LAYERS["inprocess"] = LAYERS["node"] | {"testing"}  # tools.inject_fault
# Readers of the log tree: nothing that a job waits for, and nothing of what a job is made of.
LAYERS["views"] = LAYERS["system"] | {"system"}
LAYERS["cli"] = LAYERS["node"] | {"node", "inprocess", "logs", "compat", "views"}
LAYERS["__main__"] = {"cli"}
LAYERS["sbatch_templates"] = LAYERS["warm"] = LAYERS["compat"] = set()

PURE_VIEWS = ("html", "summary", "svg", "timeline")
# nvrx-run and what it starts; the toolbox has commands about health.
TOOLS = {"doctor", "health", "toolbox"}
JOB = [
    *(f"nvrx_slurm/cli/{path.name}" for path in (PACKAGE / "cli").glob("*.py") if path.stem not in TOOLS),
    *(f"nvrx_slurm/{folder}" for folder in ("node", "slurm", "attribution", "control", "child", "monitor", "logs")),
]

# The rooms of node/, from below; `program` is above all, and the other modules of node/ itself are below.
ROOMS = ("output", "publish", "preflight", "monitors", "workers", "coordination")
MAX_FILES = 12  # of a folder of node/

OWNERS = {
    "click": ("cli/", "views/"),
    "yaml": ("config/files.py",),
    "grpc": ("health/", "logs/"),
    "cryptography": ("control/identity.py",),
    "httpx": ("attribution/web.py",),
    "google": ("health/", "logs/"),
    "msgspec": ("declared.py", "codec.py"),
    "pynvml": ("system/gpus.py",),
    "pyslurm": ("slurm/api/pyslurm_child.py",),
    "torch": ("inprocess/", "testing/", "checkpoint/tree.py", "checkpoint/rank.py", "checkpoint/dcp.py"),
    "sitecustomize": ("warm/",),
    **{f"nvrx_{path.stem}": ("warm/",) for path in (PACKAGE / "warm").glob("*.py")},  # their names in a template
    "transformers": ("huggingface.py",),
    "typing_extensions": ("declared.py",),  # for type checkers
}
IMPURE = {"os", "time", "random", "socket", "threading", "logging", "subprocess", "asyncio", "secrets", "pathlib", "io"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)


def our_files():
    """All files that git has or would take; where there is no git, all files."""
    command = ["git", "-C", str(REPO), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        return [path for path in sorted(REPO.rglob("*")) if path.is_file() and ".venv" not in path.parts]
    return [path for path in map(REPO.joinpath, sorted(listed.stdout.splitlines())) if path.is_file()]


def is_python(path):
    """Scripts without a suffix are told by their first line."""
    if path in GENERATED or path.suffix not in ("", ".py"):
        return False
    return path.suffix == ".py" or path.read_bytes()[:80].split(b"\n")[0].endswith(b"python3")


OURS = [path for path in our_files() if is_python(path)]


def python_files(*folders):
    """Our own Python files below these folders."""
    return [path for path in OURS if any(path.is_relative_to(REPO / folder) for folder in folders)]


EVERYWHERE = python_files("nvrx_slurm", "scripts", "tests", "examples", "benchmarks", "prolog")
IN_PACKAGE = python_files("nvrx_slurm")
TESTS = python_files("tests")


@cache
def tree(path):
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path):
    return list(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection():
    """It would look at half a million nodes again and again."""
    gc.disable()
    yield
    tree.cache_clear(), nodes.cache_clear()
    gc.enable()


def name(path):
    return str(path.relative_to(REPO))


_BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def nesting(node, depth=0):
    """Deepest block below `node`; an elif is as deep as its if; a nested function starts anew."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (*FUNCTIONS, ast.Lambda)):
                continue
            is_elif = field == "orelse" and isinstance(node, ast.If) and isinstance(child, ast.If) and len(value) == 1
            deeper = depth + (isinstance(child, _BLOCKS) and not is_elif)
            deepest = max(deepest, nesting(child, deeper))
    return deepest


def imports(path):
    """(line, absolute module, whether only for types) of every import in a file, also those inside functions."""
    typing_only = {
        id(inner)
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", id(node) in typing_only


def layer(module):
    """The layer of "nvrx_slurm.core.agent.agent.Agent": "core"; of "nvrx_slurm.__version__": "__init__"."""
    part = module.split(".")[1]
    return part if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists() else "__init__"


def code_lines(path):
    """Lines without blanks, comments and docstrings."""
    lines = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(path):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_files_are_short():
    sizes = {name(path): len(path.read_text().splitlines()) for path in EVERYWHERE}
    assert len(sizes) > 80
    assert {n: size for n, size in sizes.items() if size >= MAX_FILE_LINES} == {}
    code = {name(path): code_lines(path) for path in IN_PACKAGE}
    assert {n: size for n, size in code.items() if size > MAX_CODE_LINES} == {}


def test_functions_are_short_and_flat():
    wrong = []
    for path in EVERYWHERE:
        for function in (node for node in nodes(path) if isinstance(node, FUNCTIONS)):
            lines, depth = (function.end_lineno or 0) - function.lineno + 1, nesting(function)
            if lines >= MAX_FUNCTION_LINES or depth >= MAX_NESTING:
                wrong.append(f"{name(path)}:{function.lineno} {function.name}: {lines} lines, nested {depth} deep")
    assert wrong == []


def test_rooms_are_small():
    rooms = Counter(path.parent for path in python_files("nvrx_slurm/node") if path.name != "__init__.py")
    assert len(rooms) == 1 + len(ROOMS) and max(rooms.values()) <= MAX_FILES


def _goes_up(path, module, typing_only):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if mine == "testing" or not module.startswith("nvrx_slurm.") or typing_only:
        return False
    theirs = layer(module)
    return theirs != mine and theirs not in LAYERS[mine]  # KeyError: a file in no known layer


def _is_of_another_owner(path, module, _):
    top = module.split(".")[0]
    if top in sys.stdlib_module_names or top in ("nvrx_slurm", "__future__"):
        return False
    return not str(path.relative_to(PACKAGE)).startswith(OWNERS.get(top, ("no owner",)))


def _goes_up_in_node(path, module, typing_only):
    """Whether a room of node/ imports a later one, or a module beside the rooms imports a room."""
    parts, mine = module.split("."), path.relative_to(PACKAGE / "node").parts[0]
    if typing_only or mine == "program.py" or parts[:2] != ["nvrx_slurm", "node"] or parts[2] == mine:
        return False
    below = ROOMS[: ROOMS.index(mine)] if mine in ROOMS else ()
    return parts[2] == "program" or (parts[2] in ROOMS and parts[2] not in below)


def _is_impure(path, module, _):
    return module.split(".")[0] in IMPURE


def _needs_a_check(path, module, typing_only):
    return module.startswith("nvrx_slurm.health") and not (
        typing_only or module.startswith("nvrx_slurm.health.outcome")
    )


IMPORT_RULES = {
    "imports go one way": (IN_PACKAGE, _goes_up),
    "imports in node go one way": (python_files("nvrx_slurm/node"), _goes_up_in_node),
    "third-party imports have one owner": (IN_PACKAGE, _is_of_another_owner),
    "core is pure": (python_files("nvrx_slurm/core"), _is_impure),
    "pictures are pure": ([PACKAGE / f"views/{stem}.py" for stem in PURE_VIEWS], _is_impure),
    "a job needs of health only its report": (python_files(*JOB), _needs_a_check),
}


@pytest.mark.parametrize("paths, breaks", IMPORT_RULES.values(), ids=IMPORT_RULES)
def test_imports(paths, breaks):
    every = ((path, *found) for path in paths for found in imports(path))
    assert [f"{name(p)}:{line} {module}" for p, line, module, typed in every if breaks(p, module, typed)] == []


def _module_of(dotted, known):
    """The module in a dotted name that may end with what is taken from it."""
    return dotted if dotted in known or "." not in dotted else _module_of(dotted.rpartition(".")[0], known)


def test_no_circle_of_imports_at_run_time():
    """Imports within functions count, too."""
    known = {".".join(path.relative_to(REPO).with_suffix("").parts): path for path in IN_PACKAGE}
    needs = {
        module: {_module_of(found, known) for _, found, typing_only in imports(path) if not typing_only} - {module}
        for module, path in known.items()
    }
    assert list(TopologicalSorter(needs).static_order())  # raises CycleError


FOREIGN = re.compile(r"\bseeds? 0\d\d\b|\bissues? \d+|\bdesign\.md\b|\bfindings\.md\b", re.IGNORECASE)


def test_no_text_cites_a_document_that_is_not_here():
    texts = [path for path in our_files() if path.suffix in (".py", ".md", ".sh", ".cfg") and path != Path(__file__)]
    assert [name(path) for path in texts if FOREIGN.search(path.read_text())] == []


# Shells, evaluated and unpickled text, swallowed exceptions, sleeps, lost cancellations, missing docstrings: ruff.toml


@pytest.mark.parametrize("words", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_has_nothing_to_say(words):
    done = subprocess.run([sys.executable, "-m", "ruff", *words, "."], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_call_asks_for_a_shell_by_a_variable():
    """A literal is ruff's to find."""
    every = ((path, node) for path in EVERYWHERE for node in nodes(path) if isinstance(node, ast.keyword))
    assert [name(path) for path, node in every if node.arg == "shell" and ast.unparse(node.value) != "False"] == []


def test_a_test_installs_nothing():
    """`scripts/test` does, before pytest starts (tests/lib/nvrx_wheel.py is its part)."""
    lists = ((path, node) for path in TESTS for node in nodes(path) if isinstance(node, ast.List))
    wrong = {name(path) for path, node in lists for word in node.elts if ast.unparse(word) in ("'pip'", "'apt-get'")}
    assert wrong == {"tests/lib/nvrx_wheel.py"}


WALL_CLOCK = {
    "nvrx_slurm/node/coordination/coordinator.py",
    "nvrx_slurm/cli/job.py",
    "nvrx_slurm/views/runs.py",
    "nvrx_slurm/node/coordination/checkpoints.py",  # to compare with the times of files
    "nvrx_slurm/node/event_file.py",
    "nvrx_slurm/node/output/console.py",
    "nvrx_slurm/node/output/cycle_info.py",
    "nvrx_slurm/node/monitors/monitors.py",  # a heartbeat's time, to compare with files
    "nvrx_slurm/node/output/result.py",
    "nvrx_slurm/node/output/strikes.py",
    "nvrx_slurm/node/publish/publisher.py",
    "nvrx_slurm/attribution/__main__.py",
    "nvrx_slurm/cli/chain.py",
    "nvrx_slurm/cli/ending.py",
    "nvrx_slurm/cli/front.py",
    "nvrx_slurm/views/goodput.py",
    "nvrx_slurm/cli/logs.py",
    "nvrx_slurm/views/metrics.py",
    "nvrx_slurm/views/report.py",
    "nvrx_slurm/views/status.py",
    "nvrx_slurm/views/why.py",
    "nvrx_slurm/logs/merged.py",
    "nvrx_slurm/logs/shipper.py",
    "nvrx_slurm/slurm/control.py",
}


def test_nothing_decides_by_the_wall_clock_which_may_be_set_back():
    """It is in logs, in result.json, and in the end time that Slurm tells."""
    clocks = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now")
    read = ((path, node) for path in IN_PACKAGE for node in nodes(path) if isinstance(node, ast.Attribute))
    found = {name(path) for path, node in read if ast.unparse(node) in clocks}
    assert found == WALL_CLOCK


# Of Lightning and of transformers; names of NVRx's; for type checkers.
PUBLIC_TWICE = {"FaultToleranceCallback", "Detector", "Report", "Record"}
GONE = re.compile(r"(^|_)(look|looks|looked|door|guest|patience|tombstone|desk|nudge|rollcall|goodbye)(_|$)")


def test_a_name_has_one_meaning_and_no_private_metaphor():
    """Class names of the package are unique, and functions, classes and files use the field's words."""
    defined = [node.name for path in IN_PACKAGE for node in nodes(path) if isinstance(node, DEFINITIONS)]
    classes = [node.name for path in IN_PACKAGE for node in nodes(path) if isinstance(node, ast.ClassDef)]
    assert {one for one, times in Counter(classes).items() if times > 1} == PUBLIC_TWICE
    words = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", one).lower() for one in (*defined, *(p.stem for p in IN_PACKAGE))}
    assert {one for one in words if GONE.search(one)} == set()


# --- what a process really imports ------------------------------------------------------------------------------------


def loaded(code):
    """Top-level and our own modules after `code` in a fresh interpreter."""
    probe = f"{code}\nimport sys; print(*sorted(sys.modules), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", probe]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import nvrx_slurm.cli.run",
        "import nvrx_slurm.node.program, nvrx_slurm.control.client, nvrx_slurm.control.server",
        "import nvrx_slurm.monitor.main",
        "import nvrx_slurm.fault_tolerance",
        "import nvrx_slurm.checkpoint.keeper",
        "import nvrx_slurm.health.__main__, nvrx_slurm.health.hooks.run",
        "from nvrx_slurm.config.layers import resolve; resolve({}, {})",
    ],
)
def test_no_launcher_loads_torch(code):
    modules = loaded(code)
    assert not modules & {"torch", "numpy", "httpx", "yaml", "grpc", "cryptography"}  # a launcher that starts quickly
    assert "fault_tolerance" not in code or "asyncio" not in modules  # a rank, too


BASE = {"torch", "click", "pyyaml", "nvidia-ml-py", "cryptography", "msgspec"}
# Code of the extras, and what it needs.
EXTRAS = {
    "attribution": ("nvrx_slurm.attribution", "httpx"),
    "node-service": ("nvrx_slurm.health.service", "nvrx_slurm.health.checks.node_service", "grpc"),
    "log-service": ("nvrx_slurm.logs.nvrx_service", "nvrx_slurm.logs.nvrx_logs_pb2", "grpc"),
    "lightning": ("nvrx_slurm.ptl_resiliency", "lightning", "pytorch_lightning"),
    "transformers": ("nvrx_slurm.huggingface", "transformers"),
    "pyslurm": ("nvrx_slurm.slurm.api.pyslurm_child", "pyslurm"),
}
# For metrics; a job loads none of them unless it is told to.
METERED = {
    "opentelemetry", "prometheus_client", "http.server", "http.client",
    "nvrx_slurm.core.samples", "nvrx_slurm.node.publish.collectors", "nvrx_slurm.config.otel",
}  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import nvrx_slurm.cli.run, nvrx_slurm.cli.job, nvrx_slurm.cli.toolbox",
        "import nvrx_slurm.node.program, nvrx_slurm.node.output.logs",
        "import nvrx_slurm.logs.shipper, nvrx_slurm.logs.aggregator",
        "import nvrx_slurm.monitor.main, nvrx_slurm.fault_tolerance",
    ],
)
def test_a_job_loads_no_extra_that_it_does_not_use(code):
    owned = tuple(f"{module}." for modules in EXTRAS.values() for module in modules)
    modules = loaded(code)
    assert [module for module in modules if f"{module}.".startswith(owned)] == []
    assert not modules & METERED


def test_each_extra_says_how_it_is_installed():
    options = configparser.ConfigParser()
    options.read(REPO / "setup.cfg")
    base = {re.split("[>=<]", line)[0] for line in options["options"]["install_requires"].split()}
    assert base == BASE and set(options["options.extras_require"]) - {"test", "dev"} == set(EXTRAS)
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    without = [extra for extra in EXTRAS if f"pip install 'nvrx_slurm[{extra}]'" not in text]
    assert without == ["pyslurm"]  # its version has to be that of the cluster


def test_the_monitor_is_standard_library_only_and_small():
    modules = loaded("import nvrx_slurm.monitor.main")
    foreign = {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names} - {"nvrx_slurm", "__main__"}
    allowed = ("nvrx_slurm.monitor", "nvrx_slurm.core", "nvrx_slurm.child.descendants", "nvrx_slurm.child.traffic")
    site = loaded("")  # what the environment brings along
    assert {m for m in foreign - site if not m.startswith(allowed)} <= {
        "nvrx_slurm.system",
        "nvrx_slurm.child",
        "nvrx_slurm.frozen",
    }
