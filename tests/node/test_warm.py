"""Workers that are forked from a template: when they are, when they are not, and what may happen to the template."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import minicluster_init as init
import pytest
from agent_harness import REPO, kill, says, stat
from stage import await_end
from waits import WAIT_S, until

from nvrx_slurm.node.workers import launcher
from nvrx_slurm.node.workers.template import _FORK_S
from nvrx_slurm.node.workers.worker_spec import WarmSpec, WorkerContract, WorkerSpec

pytestmark = pytest.mark.process


# `slow` is beside the script. It counts its imports, and has its text from a module of its own.
SLOW = """
import os
from slow_text import TEXT
with open(os.path.join(os.environ["NVRX_TEST_GATES"], "imports"), "a") as file:
    file.write(f"{os.getpid()}\\n")
"""
LIVES = """
before = "slow" in getattr(sys.meta_path[0], "parked", ())
import slow
say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), slow.TEXT)
if CYCLE < int(sys.argv[1][0]):
    forever()
"""
PRELOAD, SOON = "--ft-preload=slow", "--ft-crash-loop-backoff=0"


@pytest.fixture
def work(rig):
    """The script, with its module beside it. Its argument: the cycle in which it ends."""
    (rig.dir / "slow.py").write_text(SLOW)
    (rig.dir / "slow_text.py").write_text("TEXT = 'first'")
    return rig.script(LIVES)


def up(one, cycle, rank):
    """How this rank came to be, its pid, and the text of its module."""
    found = one.line(rf"up {cycle} rank {rank} (\w+) pid (\d+) (\w+)$")
    return found[1], int(found[2]), found[3]


def alike(one):
    """Workers, standbys and the template. People find workers by the name of the script, and nothing else by that."""
    found = []
    for pid in one.children:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:2] == [b"-u"] or words[0] in (b"nvrx-standby", b"nvrx-template"):
            assert (b"-u" in words) == stat(pid)[0].startswith("python")
            found.append(pid)
    return found


def waiting(one, workers):
    """The template, then one standby per worker; waits for them."""
    names = ["nvrx-standby"] * len(workers) + ["nvrx-template"]

    def others():
        return sorted(set(alike(one)) - set(workers), key=lambda pid: (stat(pid)[0], began(pid)), reverse=True)

    until(lambda: sorted(stat(pid)[0] for pid in others()) == names, "all ranks have a standby")
    found = others()
    no_children = Path(f"/proc/{found[0]}/task/{found[0]}/children")
    until(lambda: not no_children.read_text() and stat(found[0])[1] == "S", "the template has told the agent")
    until(lambda: stat(one.pid)[1] == "S", "the agent has heard it")
    return [found[0], *sorted(found[1:], key=began)]


def have(one, library, workers):
    """Whether the template and all standbys have loaded a library."""
    others = set(alike(one)) - set(workers)
    return len(others) == 2 and all(library in Path(f"/proc/{pid}/maps").read_text() for pid in others)


def began(pid):
    """Order of processes by their start."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    except OSError:
        return 0, pid


def pids_of(one, cycle, how):
    """The pids of both ranks, which came to be like that."""
    found = [up(one, cycle, rank) for rank in (0, 1)]
    assert [found[rank][0] for rank in (0, 1)] == [how] * 2
    return [pid for _, pid, _ in found]


def imports(rig):
    return len((rig.dir / "imports").read_text().split())


ASKS = """
from nvrx_slurm.node.workers.template import TemplateProcess
real = TemplateProcess._expect_answer
def asks(self, bound_s):
    real(self, bound_s)
    print("the template is asked", flush=True)
TemplateProcess._expect_answer = asks
"""


def asked(one):
    """How often a template was asked for something."""
    one.read(0.02)
    return one.text.count("the template is asked")


def test_named_modules_are_imported_once_and_a_killed_template_or_standby_costs_the_warmth_only(rig, work):
    rig.before = ASKS
    one = rig.run(work, "--nproc-per-node=2", "--max-restarts=4", SOON, PRELOAD, args=("4",))
    pids = pids_of(one, 0, "forked")
    for pid in waiting(one, pids):  # as Slurm signals every process of a step
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, signum)
    os.kill(waiting(one, pids)[0], signal.SIGTERM)
    os.kill(pids[0], signal.SIGKILL)
    pids = pids_of(one, 1, "forked")
    template, first, _ = waiting(one, pids)
    assert imports(rig) == 1
    os.kill(template, signal.SIGKILL)
    one.line("the template process ended with -9")
    os.kill(first, signal.SIGKILL)
    one.line(rf"standby {first} of local rank \d was killed")
    os.kill(pids[0], signal.SIGKILL)
    pids = [up(one, 2, rank)[1] for rank in (0, 1)]
    assert [up(one, 2, rank)[0] for rank in (0, 1)] == ["executed"] * 2  # not one of each kind
    # A stopped template or standby holds up no restart. The template is killed with a request that it has not read.
    stopped, before = waiting(one, pids), asked(one)
    template = stopped[0]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    pids = pids_of(one, 3, "forked")
    until(lambda: asked(one) > before, "it is asked for the next standbys")
    os.kill(template, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{template}").exists(), "it is reaped")
    os.kill(pids[0], signal.SIGKILL)
    assert one.wait() == 0
    pids_of(one, 4, "executed")


def test_ranks_are_forked_where_the_working_directory_was_removed(rig, work):
    rig.before = "import os; os.mkdir('gone'); os.chdir('gone')"
    one = rig.run(work, "--nproc-per-node=2", "--max-restarts=1", SOON, PRELOAD, args=("1",))
    pids = pids_of(one, 0, "forked")
    waiting(one, pids)
    (rig.dir / "gone").rmdir()
    os.kill(pids[0], signal.SIGKILL)
    pids_of(one, 1, "forked")
    assert one.wait() == 0


WAITED = """
from nvrx_slurm.node.workers.launcher import Launcher
wait = Launcher.wait
async def timed(self, forked=True):
    began_s = self._loop.time()
    took_s = await wait(self, forked)
    imports_s = max(template.imports_s for template in self._templates)
    print(f"waited {self._loop.time() - began_s:.6f} imports {imports_s:.6f}", flush=True)
    return took_s
Launcher.wait = timed
"""


def test_a_fault_before_standbys_are_ready_waits_as_long_as_their_imports_took(rig, work):
    rig.before = ASKS + WAITED
    one = rig.run(work, "--nproc-per-node=2", "--max-restarts=2", SOON, PRELOAD, args=("2",))
    pids = pids_of(one, 0, "forked")
    template, before = waiting(one, pids)[0], asked(one)
    os.kill(template, signal.SIGSTOP)
    os.kill(pids[0], signal.SIGKILL)
    pids = pids_of(one, 1, "forked")
    until(lambda: asked(one) > before, "it is asked for the next standbys")
    os.kill(pids[0], signal.SIGKILL)
    pids_of(one, 2, "executed")
    waited_s, imports_s = map(float, re.findall(r"waited (\S+) imports (\S+)", one.text)[2])
    assert imports_s <= waited_s < imports_s + _FORK_S / 2  # after that time the template is killed
    assert one.wait() == 0


@pytest.mark.parametrize(
    "flags, argument, python",
    [(["--ft-warm=off"], "0", ""), ([], "0${local_rank}", ""), ([], "0", "python")],
    ids=["off", "arguments of each rank", "another interpreter"],
)
def test_workers_are_executed(rig, work, flags, argument, python):
    wrapper = rig.dir / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    env = {"PYTHON_EXEC": str(wrapper)} if python else {}
    one = rig.ran(work, "--nproc-per-node=2", PRELOAD, *flags, args=(argument,), **env)
    assert imports(rig) == 2
    pids_of(one, 0, "executed")


# As torch does: who has asked for GPUs is told so in a fork.
TORCH = """
import os
class default_generator: seed = staticmethod(int)
class _C: _cuda_isInBadFork = staticmethod(bool)
class cuda:
    def is_available():
        os.register_at_fork(after_in_child=lambda: setattr(_C, "_cuda_isInBadFork", lambda: True))
"""
UNFIT = {
    "thread": ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "a thread"),
    "socket": ("import socket; S = socket.create_server(('127.0.0.1', 0))", "socket:["),
    "child": ("import subprocess; P = subprocess.Popen(['sleep', '60'])", "started a process"),
    "device": ("F = open('/dev/zero')", "/dev/zero open"),
    "file": ("F = open('/etc/hostname')", "/etc/hostname open"),
    "rank": ("import os; R = os.environ.get('RANK')", "reads RANK"),
    "exception": ("raise LookupError('no such library')", "LookupError: no such library"),
    "exit": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "program": ("import os, sys; os.execv(sys.executable, sys.orig_argv)", "executes another program"),
    "gpus": ("import torch; torch.cuda.is_available()", "asks for GPUs"),
    "signal": ("import signal; signal.signal(signal.SIGUSR2, print)", "changes how signals are handled"),
    "directory": ("import os; os.chdir('/')", "changes the working directory"),
    "umask": ("import os; os.umask(0o11)", "changes the umask"),
    "locale": ("import locale; locale.setlocale(locale.LC_NUMERIC, 'C.UTF-8')", "changes the locale"),
    "limit": ("import sys; sys.setrecursionlimit(3456)", "changes limits of the interpreter"),
    "stream": ("import io, sys; sys.stdout = io.StringIO()", "changes its streams"),
    "builtin": ("import builtins; builtins._ = str", "changes builtins"),
    "timeout": ("import socket; socket.setdefaulttimeout(9)", "changes the default timeout"),
    "zone": ("import os, time; os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "changes the time zone"),
    "nice": ("import os; os.nice(1)", "changes the scheduler"),
    "missing": (None, "No module named 'bad_missing'"),
}


def test_modules_that_cannot_be_forked_are_left_out(rig, work):
    (rig.dir / "torch.py").write_text(TORCH)
    for name, (code, _) in UNFIT.items():
        if code is not None:
            (rig.dir / f"bad_{name}.py").write_text(code)
    names = ",".join(f"bad_{name}" for name in UNFIT)
    one = rig.ran(work, "--nproc-per-node=2", f"--ft-preload=slow,{names}", args=("0",))
    pids_of(one, 0, "forked")
    for name, (_, told) in UNFIT.items():
        sentences = [said for said in one.said if f"workers import bad_{name} themselves" in said]
        assert len(sentences) == 1 and told in sentences[0]
    assert one.text.count("up 0") == 2  # the template never ran the script


def test_a_template_that_dies_of_a_module_costs_the_warmth_only(rig, work):
    (rig.dir / "bad.py").write_text("import ctypes; ctypes.string_at(0)")
    one = rig.ran(work, "--nproc-per-node=2", "--ft-preload=slow,bad", args=("0",))
    pids_of(one, 0, "executed")
    assert len([said for said in one.said if "the template process ended with" in said]) == 1


def test_a_changed_module_is_executed_and_then_forked_with_its_new_text(rig, work):
    one = rig.run(work, "--nproc-per-node=2", "--max-restarts=2", PRELOAD, args=("2",))
    pids = [up(one, 0, rank)[1] for rank in (0, 1)]
    waiting(one, pids)
    (rig.dir / "slow_text.py").write_text("TEXT = 'second'")
    os.kill(pids[0], signal.SIGKILL)
    found = [up(one, 1, rank) for rank in (0, 1)]
    assert [(how, text) for how, _, text in found] == [("executed", "second")] * 2
    waiting(one, [pid for _, pid, _ in found])
    os.kill(found[0][1], signal.SIGKILL)
    assert one.wait() == 0
    assert [up(one, 2, rank)[::2] for rank in (0, 1)] == [("forked", "second")] * 2


def test_a_killed_agent_takes_template_and_standbys_with_it(rig, work):
    one = rig.run(work, "--nproc-per-node=2", PRELOAD, args=("1",))
    workers = [up(one, 0, rank)[1] for rank in (0, 1)]
    others = [found for pid in waiting(one, workers) if (found := init.process(pid))]
    kill(one, *workers)
    assert len(others) == 3 and await_end(others, 1.0) == []


def test_auto_preloads_what_the_first_workers_loaded_and_on_a_spare_what_the_script_imports(rig):
    pytest.importorskip("numpy")
    script = rig.script("""
        before = "numpy" in getattr(sys.meta_path[0], "parked", ())
        import numpy
        say("up", CYCLE, "rank", RANK, "forked" if before else "executed", "pid", os.getpid(), "text")
        gate(f"end{CYCLE}")
    """)
    rig.before = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"  # no core without a worker
    flags = "--max-restarts=2", SOON
    nodes = rig.step(range(2), 2, "1:2", script, *flags)
    active = says("up 0", *nodes)
    (spare,) = [one for one in nodes if one is not active]
    how, pid, _ = up(active, 0, 0)
    assert how == "executed"  # in what is imported
    until(lambda: have(active, "numpy", [pid]), "the rank has told what it imports")
    os.kill(pid, signal.SIGKILL)
    how, pid, _ = up(active, 1, 0)
    assert how == "forked"
    until(lambda: have(spare, "numpy", []), "the spare has heard what others import")
    kill(active, pid)
    assert up(spare, 2, 0)[0] == "forked"
    (late,) = rig.step([nodes.index(active)], 2, "1:2", script, *flags)
    until(lambda: have(late, "numpy", []), "it hears of that from a node that was a spare, too")
    rig.ends_well("end2", spare, late)


# Stand in for libraries that take seconds to import.
LIBRARIES = {
    "torch/__init__": TORCH,
    "torch/_dynamo": "",
    "transformers": "class Trainer: pass\nimport os\nopen('grown', 'a').write(f'{os.getpid()}\\n')",
    "accelerate": UNFIT["thread"][0],
}
FIRST = """# -*- coding: latin-1 -*-
# \xe9
import sys
PARKED = getattr(sys.meta_path[0], "parked", ())
BEFORE = [name for name in ("torch._dynamo", "transformers", "accelerate") if name in PARKED]
import torch
import accelerate
from transformers import Trainer
"""


HOLDS = """
from nvrx_slurm.child import processes
hold = processes.hold
def told(*args):
    print("an interpreter waits", flush=True)
    return hold(*args)
processes.hold = told
"""


def with_libraries(rig, first, **libraries):
    """A script that begins with `first`, and what the launcher's environment has for it."""
    for name, text in {**LIBRARIES, **libraries}.items():
        path = rig.dir / "libraries" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    says = "say('up', CYCLE, 'rank', RANK, 'with', *BEFORE, 'pid', os.getpid())"
    script = Path(rig.script(f"{says}\nif CYCLE < int(sys.argv[1]): forever()"))
    script.write_text(first + script.read_text(), encoding="latin-1")
    return str(script), {"PYTHONPATH": f"{rig.dir / 'libraries'}:{REPO}"}


def had(one, cycle, rank=0):
    """The libraries that this rank had before its script imported them, and its pid."""
    found = one.line(rf"up {cycle} rank {rank} with (.*)pid (\d+)$")
    return found[1].strip(), int(found[2])


def test_the_first_workers_are_forked_and_the_next_ones_have_what_can_be_forked_too(rig):
    script, env = with_libraries(rig, FIRST)
    rig.before = HOLDS
    one = rig.run(script, "--nproc-per-node=2", "--max-restarts=2", SOON, args=("2",), **env)
    pids = [had(one, 0, rank)[1] for rank in (0, 1)]
    assert had(one, 0)[0] == "torch._dynamo transformers"
    assert "an interpreter waits" not in one.text

    def renewed():
        found = sorted(set(alike(one)) - set(pids), key=began)  # no standby is older than the template
        names = [stat(pid)[0] for pid in found] == ["nvrx-template", "nvrx-standby", "nvrx-standby"]
        return names and str(found[0]) in (rig.dir / "grown").read_text().split()

    until(renewed, "all standbys are the successor's")
    waiting(one, pids)
    os.kill(pids[0], signal.SIGKILL)
    assert had(one, 1)[0] == "torch._dynamo transformers"
    os.kill(had(one, 1)[1], signal.SIGKILL)  # at once: workers wait for standbys that are on their way
    assert one.wait() == 0 and had(one, 2)[0] == "torch._dynamo transformers"
    assert "workers import" not in one.text


@pytest.mark.parametrize(
    "first, more, before, held",
    [
        (FIRST, {"torch/__init__": UNFIT["thread"][0]}, "transformers", 0),  # this one needs no torch
        (FIRST.partition("import accel")[0], {"torch/__init__": UNFIT["thread"][0]}, "", 2),
        (FIRST.replace("import sys", "import os, sys; os.environ['X'] = '1'"), {}, "", 0),
        (FIRST, {"sitecustomize": "import sys; sys.path.append('/of/this/site')"}, "", 2),
        (FIRST, {"sitecustomize": ""}, "torch._dynamo transformers", 2),
    ],
    ids=[
        "torch cannot be forked",
        "nothing can be forked",
        "a variable is set before",
        "a path is set before",
        "it may be, and is not",
    ],
)
def test_the_first_workers_are_executed_in_doubt(rig, first, more, before, held):
    script, env = with_libraries(rig, first, **more)
    rig.before = HOLDS
    one = rig.ran(script, "--nproc-per-node=2", args=("0",), **env)
    assert [had(one, 0, rank)[0] for rank in (0, 1)] == [before, before]
    assert one.text.count("an interpreter waits") == held
    # The coordinator tells why, if it hears before the plan that no template can be made.
    others = [said for said in one.said if not said.startswith("cycle 0: all ranks are executed")]
    assert not [said for said in others if "themselves" in said or "executed" in said]


@pytest.mark.matrix
@pytest.mark.torch
def test_a_forked_rank_under_the_in_process_wrapper(rig):
    """An exception is the wrapper's own business. A killed rank is not: the next cycle replaces it."""
    pytest.importorskip("torch")
    script = rig.script("""
        before = "torch" in getattr(sys.meta_path[0], "parked", ())
        from datetime import timedelta
        from nvrx_slurm import inprocess
        say("came", CYCLE, RANK, "forked" if before else "executed")
        @inprocess.Wrapper(last_call_wait=timedelta(0), heartbeat_timeout=timedelta(seconds=110))
        def train(call: inprocess.CallWrapper):
            say("entered", CYCLE, call.iteration, "as", os.environ["RANK"], "pid", os.getpid())
            if CYCLE == call.iteration == 0 and RANK == 1:
                raise RuntimeError("as asked")
            while CYCLE == 0:
                time.sleep(0.01)
        train()
    """)
    policy = ("--restart-policy=min-healthy", "--nproc-per-node=2", "--max-restarts=1", "--ft-preload=torch")
    one = rig.run(script, *policy)
    pids = [int(one.line(rf"entered 0 1 as {rank} pid (\d+)$", 90)[1]) for rank in (0, 1)]
    until(lambda: len(alike(one)) == 5, "all ranks have a standby, and there is the template")
    os.kill(pids[1], signal.SIGKILL)
    for rank in (0, 1):
        one.line(rf"entered 1 0 as {rank} ", 90)
    assert one.wait(90) == 0
    assert [one.line(rf"came {cycle} {rank} (\w+)$")[1] for cycle in (0, 1) for rank in (0, 1)] == ["forked"] * 4


def test_bad_modules(rig, work):
    one = rig.run(work, "--ft-preload=torch,,5", args=("0",))
    assert one.wait() == 2 and "--ft-preload" in one.text and "names of Python modules" in one.text


def test_a_preparation_that_breaks_is_told_at_once(tmp_path, monkeypatch):
    """Not when the task is collected, which may be an hour later."""
    spec = WorkerSpec(["true"], WorkerContract("", "", ""), {}, 9, lambda local_rank: 0)

    async def story():
        told = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.set_result(context["exception"]))
        one = launcher.Launcher(spec, 1, tmp_path, launcher.LauncherHooks(print))
        monkeypatch.setattr(launcher, "_loaded_by", lambda pid: {}["defect"])
        one._prepare(one._prepare_next(WarmSpec(None), os.getpid()))
        assert isinstance(await asyncio.wait_for(told, WAIT_S), KeyError)
        await one.close()

    asyncio.run(story())
