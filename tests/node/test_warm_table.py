"""A forked worker cannot be told from one that was executed: one table of facts, one of ends, on each Python."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from stage import free_port
from waits import WAIT_S

DATA = Path(__file__).parents[1] / "data"
DRIVER = Path(__file__).with_name("warm_driver.py")
sys.path.insert(0, str(DATA))
import warm_ends  # noqa: E402

pytestmark = pytest.mark.matrix


def _pythons():
    """Our own Python, and those of other versions that pyenv has here."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for path in sorted(Path.home().glob(".pyenv/versions/3.1[0-9].*/bin/python")):
        found.setdefault(path.parts[-3].rpartition(".")[0], str(path))
    return found


PYTHONS = _pythons()
OTHERS = [pytest.param(version, marks=pytest.mark.matrix) for version in list(PYTHONS)[1:]]
VERSIONS = pytest.mark.parametrize("version", [*list(PYTHONS)[:1], *OTHERS])


def start(directory, argv, envs, preload, path0=None, *, env=None, prefixes=None, imports=None, later=None, says=""):
    """Code, stdout and stderr of each worker: executed, or forked from a template with `preload`, or from the successor
    of one with `imports` that nobody named, with `later`, too.

    `env`: of the agent. `says`: in the one sentence for people; "" = there is none.
    """
    private = directory / f"private-{'forked' if preload or imports else 'executed'}"
    private.mkdir(exist_ok=True)
    order = {"argv": argv, "envs": envs, "preload": preload, "path0": path0, "directory": str(private)}
    order |= {"imports": imports, "later": later}
    order["prefixes"] = prefixes or [[]] * len(envs)
    more = {**(env or {}), "RANK": "9"}  # a rank's variable of the agent's own is not the worker's
    program = f"""
import os, resource, runpy, sys
os.environ.update({more!r}, NVRX_TEST_AGENT=str(os.getpid()))
os.umask(0o27)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 600))
sys.path.insert(0, {str(DRIVER.parents[2])!r})
runpy.run_path({str(DRIVER)!r}, run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(order), cwd=directory, text=True, capture_output=True, timeout=WAIT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert len(result["said"]) == bool(says) and says in "".join(result["said"])
    return result["workers"]


# How the script is named, and what is in the agent's environment.
STARTS = {
    "script": {"CUDA_VISIBLE_DEVICES": "1,0", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "relative": {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "5"},
    "symlink": {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1", "PYTHONOPTIMIZE": "1", "PYTHONPATH": "/one:/other"},
    "module": {"PYTHONPATH": ""},
    "run_path": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1:replace"},
    "folder": {"NVRX_TEST_TEXT": "a=b\nc\udcff"},
    "zip": {"PYTHONFAULTHANDLER": "", "PYTHONSAFEPATH": "1"},
}

USUAL = ("script", "symlink", "module")


def _lay_out(directory, python, how):
    """The command line of a worker, and what Python puts in front of sys.path."""
    (directory / "beside.py").write_text("")
    script, probe = directory / "train.py", (DATA / "warm_probe.py").read_text()
    script.write_text(probe)
    line, path0 = [python, "-u"], str(directory)
    if how == "script":
        return [*line, str(script), "--flag", "value"], path0
    if how == "relative":
        return [*line, "train.py"], path0
    if how == "symlink":
        (directory / "elsewhere").mkdir()
        (directory / "elsewhere" / "link.py").symlink_to(script)
        return [*line, str(directory / "elsewhere" / "link.py")], path0
    if how == "module":
        return [*line, "-m", "train", "x"], path0
    if how == "run_path":
        code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        return [*line, "-c", code, str(script)], ""
    inside = directory / "inside"
    inside.mkdir()
    (inside / "__main__.py").write_text(probe)
    (inside / "beside.py").write_text("")
    if how == "zip":
        with zipfile.ZipFile(directory / "train.zip", "w") as archive:
            for name in ("__main__.py", "beside.py"):
                archive.write(inside / name, name)
        return [*line, str(directory / "train.zip")], None
    return [*line, str(inside)], None


@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how in USUAL else pytest.mark.matrix) for how in STARTS])
@VERSIONS
def test_facts(tmp_path, version, how):
    argv, path0 = _lay_out(tmp_path, PYTHONS[version], how)
    facts = []
    for imports, later in ((None, None), (["decimal"], ["asyncio"])):
        rank = {"RANK": "0", "NVRX_CYCLE": "3"}
        ((code, out, err),) = start(
            tmp_path, argv, [rank], None, path0=path0, env=STARTS[how], imports=imports, later=later
        )
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["forked"] is (imports is not None)
        facts.append(found["facts"])
    assert len(facts[0]) >= 16 and not [fact for fact in facts[0].items() if "Error" in str(fact)]
    for name, executed in facts[0].items():
        assert facts[1][name] == executed, name


def _plain(text):
    """Without what differs from process to process."""
    return re.sub(r"0x[0-9a-f]+|random 0\.\d+|hash -?\d+|pid \d+", "...", text)


@VERSIONS
def test_ends(tmp_path, version):
    argv = [PYTHONS[version], "-u", str(DATA / "warm_ends.py")]
    envs = [{"ROLE_NAME": name} for name in ("forked", *warm_ends.ENDS)]
    executed, forked = (
        start(tmp_path, argv, envs, None, path0=str(DATA), imports=imports) for imports in (None, ["decimal"])
    )
    assert (executed[0][1], forked[0][1]) == ("False\n", "True\n")
    for name, before, after in zip(warm_ends.ENDS, executed[1:], forked[1:], strict=True):
        assert [before[0], *map(_plain, before[1:])] == [after[0], *map(_plain, after[1:])], name


CUSTOM = """import os, sys
print(__name__, os.environ["RANK"], "NVRX_TEMPLATE" in os.environ, [name for name in sys.path if "private" in name])
"""
WORK = """import sys
if "decimal" in getattr(sys.meta_path[0], "parked", ()):
    open("forked", "a").write("x")
print([sys.modules.get(name) for name in sys.argv[1:]])
"""


@pytest.mark.parametrize("fails", ["", "raise ValueError('as asked')"])
@VERSIONS
def test_the_users_own_sitecustomize_runs_in_each_worker(tmp_path, version, fails):
    (tmp_path / "sitecustomize.py").write_text(CUSTOM + fails)
    (tmp_path / "usercustomize.py").write_text(CUSTOM)  # a virtual environment has none
    (tmp_path / "work.py").write_text(WORK)
    argv, env = [PYTHONS[version], "-u", "work.py", "sitecustomize", "usercustomize"], {"PYTHONPATH": str(tmp_path)}
    envs = [{"RANK": "0"}, {"RANK": "1"}]
    executed, forked = (start(tmp_path, argv, envs, preload, env=env) for preload in (None, ["decimal"]))
    assert executed == forked and (tmp_path / "forked").read_text() == "xx"
    for rank, (code, out, err) in enumerate(forked):
        assert code == 0 and out.startswith(f"sitecustomize {rank} False []\n") and ("as asked" in err) == bool(fails)


def test_without_its_hook_the_template_does_not_run_the_script(tmp_path):
    """This Python does not look at PYTHONPATH, so it never imports our sitecustomize."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    python.chmod(0o755)
    (tmp_path / "work.py").write_text("import os; open('runs', 'a').write(os.environ['RANK'])")
    argv, envs = [str(python), "-u", "work.py"], [{"RANK": "0"}, {"RANK": "1"}]
    workers = start(tmp_path, argv, envs, ["decimal"], says="another sitecustomize")
    assert workers == [[0, "", ""]] * 2 and sorted((tmp_path / "runs").read_text()) == ["0", "1"]


def test_each_prefix_has_a_template_of_its_own(tmp_path):
    """As numactl's: what it binds is inherited by the workers."""
    (tmp_path / "mark.py").write_text("import os; PID = os.getpid()")
    script = "import os, sys; before = 'mark' in getattr(sys.meta_path[0], 'parked', ())\nimport mark"
    script += "\nprint(os.nice(0), before, mark.PID)"
    (tmp_path / "work.py").write_text(script)
    here = os.getpriority(os.PRIO_PROCESS, 0)
    prefixes = [["nice", "-n", str(step)] for step in (1, 1, 2, 2)]
    argv, envs = [sys.executable, "-u", "work.py"], [{"RANK": str(rank)} for rank in range(4)]
    workers = start(tmp_path, argv, envs, ["mark"], prefixes=prefixes, path0=str(tmp_path))
    found = [out.split() for _, out, _ in workers]
    assert [(int(nice) - here, before) for nice, before, _ in found] == [(1, "True")] * 2 + [(2, "True")] * 2
    assert found[0][2] == found[1][2] != found[2][2] == found[3][2]


COUNTS = """import resource
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
import many
print(faults() - before)
"""


@VERSIONS
def test_a_worker_writes_to_few_pages_of_the_template(tmp_path, version):
    """A fault for each page that it copies; a look at each module would be one to three for each."""
    (tmp_path / "many").mkdir()
    names = [f"one{number}" for number in range(800)]
    for name in names:
        (tmp_path / "many" / f"{name}.py").write_text("".join(f"def f{one}(): return {one}.5\n" for one in range(40)))
    (tmp_path / "many" / "__init__.py").write_text(f"from many import {', '.join(names)}")
    (tmp_path / "work.py").write_text(COUNTS)
    argv = [PYTHONS[version], "-u", "work.py"]
    workers = start(tmp_path, argv, [{"RANK": "0"}], ["many"], path0=str(tmp_path))
    assert int(workers[0][1]) < len(names) / 2


# Enters itself wherever a module can.
ENTERS = """
import atexit
atexit.register(print, "before the imports")
import other_end, copyreg, linecache, logging, multiprocessing.util, sys, threading, warnings, weakref
class Shape: pass
SHAPE, HANDLER = Shape(), logging.StreamHandler()
weakref.finalize(SHAPE, print, "of the import")
multiprocessing.util.Finalize(SHAPE, print, exitpriority=5)
multiprocessing.util.register_after_fork(SHAPE, print)
copyreg.pickle(Shape, repr)
HANDLER.set_name("of the import")
logging.addLevelName(33, "LOUD")
linecache.cache["site-packages/of the import"] = (1, None, ["a"], "b")
warnings.simplefilter("once", ImportWarning)
warnings.warn("of the import", ImportWarning)
sys.excepthook, sys.unraisablehook = print, repr
atexit.register(print, "at the end")
"""
ASKS = """
import json, sys
forked = "enters" in getattr(sys.meta_path[0], "parked", ())
sys.path.append(sys.argv[1])
from registries import registries
def facts():
    names = map(repr, (sys.excepthook, sys.displayhook, sys.unraisablehook))
    return [registries(), [str(one) for one in sys.modules["warnings"].filters], *names]
import weakref
mine = weakref.finalize(facts, print, "of the script")
before = facts()
import enters
print(json.dumps([before, facts()]))
print(forked, file=sys.stderr)
sys.excepthook = sys.__excepthook__
"""


@VERSIONS
def test_what_an_import_enters_is_there_from_then_on(tmp_path, version):
    """And not before."""
    (tmp_path / "enters.py").write_text(ENTERS)
    (tmp_path / "other_end.py").write_text("import atexit; atexit.register(print, 'of another one')")
    (tmp_path / "work.py").write_text(ASKS)
    argv = [PYTHONS[version], "-u", "work.py", str(DATA / "warm_facts")]
    executed, forked = (start(tmp_path, argv, [{"RANK": "0"}], one, path0=str(tmp_path)) for one in (None, ["enters"]))
    assert [executed[0][2].endswith("False\n"), forked[0][2]] == [True, "True\n"]
    (told, *ends), (others, *other_ends) = (one[0][1].splitlines() for one in (executed, forked))
    before, after = json.loads(told)
    assert before != after and [executed[0][0], *ends] == [forked[0][0], *other_ends]
    assert json.loads(others) == [before, after]


def test_a_module_that_several_ones_make_is_there_with_the_first_of_them(tmp_path):
    """As Cython's runtime."""
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text("import sys; sys.modules.setdefault('runtime', type(sys)('runtime'))")
    (tmp_path / "third.py").write_text((tmp_path / "one.py").read_text())
    argv = [sys.executable, "-u", "work.py"]
    for first, says in (
        ("other", ""),
        ("third", ""),
        ("third; sys.modules['runtime'].x = 1", "another module runtime"),
    ):
        (tmp_path / "work.py").write_text(
            f"import sys; print('runtime' in sys.modules); import {first}; print('runtime' in sys.modules); import one"
        )
        workers = start(tmp_path, argv, [{}], ["one", "other"], path0=str(tmp_path), says=says)
        assert workers[0][0] == 0 and workers[0][1].endswith("False\nTrue\n")


@pytest.mark.matrix
@pytest.mark.torch
def test_torch(tmp_path):
    pytest.importorskip("torch")
    argv, found = [sys.executable, "-u", str(DATA / "warm_torch.py")], []
    for preload in (None, ["numpy", "torch", "torch._dynamo"]):
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        workers = start(tmp_path, argv, [place | {"RANK": rank} for rank in "01"], preload, str(DATA))
        assert [code for code, _, _ in workers] == [0, 0], workers
        told = [json.loads(out) for _, out, _ in workers]
        assert [one["forked"] for one in told] == [preload is not None] * 2
        found.append([one["facts"] for one in told])
        for random in ("seed", "random", "numpy"):
            assert len({str(facts.pop(random)) for facts in found[-1]}) == 2, random
    assert found[0] == found[1] and found[0][0]["sum"] == 3.0


def test_a_sitecustomize_that_changes_the_path_executes_workers(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path / 'overlay')!r})")
    (tmp_path / "work.py").write_text("import sys; print('decimal' in getattr(sys.meta_path[0], 'parked', ()))")
    argv, env = [sys.executable, "-u", "work.py"], {"PYTHONPATH": str(tmp_path)}
    for named, said in ((True, "sys.path"), (False, "")):  # a user who asked for nothing is told nothing
        own = {"preload": ["decimal"]} if named else {"preload": None, "imports": ["decimal"]}
        workers = start(tmp_path, argv, [{"RANK": "0"}], env=env, says=said, **own)
        assert workers == [[0, "False\n", ""]]
