"""Real `nvrx-run` processes without Slurm, read line by line, signalled by pid and reaped: for this directory's tests.

Workers are plain Python scripts. Every wait ends after WAIT_S at the latest.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import minicluster_init as init
from stage import await_end, free_port, running_with
from waits import WAIT_S, until

from nvrx_slurm.child import descendants

REPO = Path(__file__).resolve().parents[2]
ORPHAN_S = 1.0  # how long something of ours may outlive its agent
MARK = "NVRX_TEST_MARK"  # in the environment of everything that a test starts

# Head of every worker: `say` is one line on stdout; `forever` waits for signals only; `gate` for Rig.open().
WORKER = f"""
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {str(REPO)!r})
RANK, LOCAL, GROUP = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "GROUP_RANK"))
CYCLE = int(os.environ["NVRX_CYCLE"])
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def forever():
    while True:
        signal.pause()
def gate(name="go"):
    path = os.path.join(os.environ["NVRX_TEST_GATES"], name)
    try:
        os.mkfifo(path)
    except FileExistsError:
        pass
    os.close(os.open(path, os.O_RDONLY))  # waits until Rig.open() has it open for writing
"""
# More of the head, where ranks are monitored.
CLIENT = """
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
"""

UP = """
say("up", CYCLE, "group", GROUP, "pid", os.getpid())
"""
UNTIL_TOLD = UP + 'gate(f"end{CYCLE}")\n'  # by rig.open("endN"), N the cycle in which it may end
QUICK = ("--ft-keepalive-interval=0.7", "--ft-keepalive-timeout=0.7")  # a busy machine delays a beat by some tenths


def ended(pidfd, timeout_s=WAIT_S):
    """Whether the process behind `pidfd` ended in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def stat(pid):
    """Name, state letter and parent of a process; "", "", -1 if it is gone."""
    found = init._stat(pid)
    return (found[0].name, found[2], found[1]) if found else ("", "", -1)


class Launcher:
    """One `nvrx-run` process; stdout and stderr come through one pipe, in order."""

    def __init__(self, argv, env, cwd, split=False):
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if split else subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.signal = self.process.send_signal
        self.pidfd = os.pidfd_open(self.pid)
        self._out = self.process.stdout.fileno()
        os.set_blocking(self._out, False)
        self.text = ""
        self._eof = False

    def _read_some(self, deadline_s):
        """Wait for output, its end, or the deadline."""
        left_s = max(0.0, deadline_s - time.monotonic())
        ready, _, _ = select.select([self._out], [], [], left_s)
        if ready:
            chunk = os.read(self._out, 1 << 16)
            self._eof = not chunk
            self.text += chunk.decode("utf-8", "replace")

    def read(self, timeout_s):
        """Take what it prints within `timeout_s` seconds."""
        if not self._eof:
            self._read_some(time.monotonic() + timeout_s)

    def line(self, pattern, timeout_s=WAIT_S):
        """The first match of `pattern` in the lines of the output; waits for it."""
        deadline_s = time.monotonic() + timeout_s
        compiled = re.compile(pattern, re.MULTILINE)
        while (match := compiled.search(self.text, 0, self.text.rfind("\n") + 1)) is None:
            late = time.monotonic() >= deadline_s
            assert not late and not self._eof, f"no {pattern!r} in the output of {self.pid}:\n{self.text}"
            self._read_some(deadline_s)
        return match

    def ranks(self, pattern, count=2):
        """Wait until each rank of this node has printed such a line."""
        for rank in range(count):
            self.line(rf"\[rank {rank}\] {pattern}")

    def wait(self, timeout_s=WAIT_S):
        """Its exit code, with all of its output in `text`; negative = by that signal."""
        deadline_s = time.monotonic() + timeout_s
        while not self._eof and time.monotonic() < deadline_s:
            self._read_some(deadline_s)
        assert ended(self.pidfd, max(0.0, deadline_s - time.monotonic())), f"{self.pid} did not end:\n{self.text}"
        return self.process.wait()

    def close(self):
        """Kill what was not waited for; give everything back."""
        with self.process:  # which closes its pipes, and waits
            self.process.kill()
        os.close(self.pidfd)

    @property
    def said(self):
        """The launcher's own sentences, without their heads."""
        return re.findall(r"nvrx-run\[[^]]+\]: (.*)$", self.text, re.M)

    @property
    def cycles(self):
        """The cycles that its workers saw."""
        return sorted({int(cycle) for cycle in re.findall(r"\] up (\d+) ", self.text)})

    @property
    def children(self):
        """Its child processes: monitors and workers."""
        return descendants.children(self.pid)

    def monitored(self):
        """Wait until each rank has its monitor."""
        until(self.monitors, "its ranks are monitored")

    def monitors(self):
        return [pid for pid in self.children if stat(pid)[0].startswith("nvrx-monitor")]


def up(one, cycle):
    """(group rank, pid) of the one worker of this node in `cycle`."""
    found = one.line(rf"up {cycle} group (\d+) pid (\d+)$")
    return int(found[1]), int(found[2])


def says(pattern, *nodes, timeout_s=WAIT_S):
    """The node that prints a line with `pattern` first; waits for it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := [one for one in nodes if re.search(pattern, one.text)]):
        assert time.monotonic() < deadline_s, f"no node says {pattern!r}"
        for one in nodes:
            one.read(0.02)
    return found[0]


def kill(one, *workers):
    """SIGKILL an agent: its workers are gone within a second."""
    processes = [found for pid in workers if (found := init.process(pid))]
    one.signal(signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    assert await_end(processes, 1.0) == []


class Rig:
    """Starts launchers of one job, knows its log tree, and tells afterwards what was left."""

    def __init__(self, directory, mark):
        self.dir = directory
        self.mark = mark
        self.logs = directory / "logs"
        self.port = free_port()
        self.launchers = []
        self._opened = []  # gates
        self.prefix = ()  # words before the command of each launcher
        self.before = ""  # Python code that runs in each launcher before nvrx-run
        (directory / "tmp").mkdir()

    def script(self, code, name="work.py"):
        """Write a worker script; returns its path."""
        path = self.dir / name
        path.write_text(WORKER + textwrap.dedent(code))
        return str(path)

    def open(self, name="go"):
        """Let the workers pass that wait, or will wait, at the gate `name`."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.dir / name)
        self._opened.append(os.open(self.dir / name, os.O_RDWR))

    def env(self, **more):
        """Environment of a launcher: ours without Slurm's, and marked."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NVRX_", "PET_"))}
        kept |= {MARK: self.mark, "TMPDIR": str(self.dir / "tmp"), "PYTHONPATH": str(REPO)}
        kept |= {"NVRX_TEST_GATES": str(self.dir), "TORCHINDUCTOR_CACHE_DIR": str(self.dir / "inductor")}
        return kept | more

    def run(self, script, *flags, args=(), split=False, **env):
        """Start one `nvrx-run` for one node (or with the flags given)."""
        program = f"import sys\n{self.before}\nfrom nvrx_slurm.cli.run import main\nmain(sys.argv[1:])"
        argv = [*self.prefix, sys.executable, "-c", program, f"--log-dir={self.logs}", *flags, script, *args]
        launcher = Launcher(argv, self.env(**env), self.dir, split)
        self.launchers.append(launcher)
        return launcher

    def ran(self, script, *flags, **how):
        """The same, when the job has ended well."""
        one = self.run(script, *flags, **how)
        assert one.wait() == 0, one.text
        return one

    def ends_well(self, gate, *nodes):
        """Let the workers pass the gate, and wait for the end of the job on these nodes."""
        self.open(gate)
        assert [one.wait() for one in nodes] == [0] * len(nodes)

    def node(self, rank, nnodes, script, *flags, **env):
        """Start the agent of node `rank` of a job on loopback; node 0 coordinates and waits for all MAX nodes."""
        place = (f"--nnodes={nnodes}", f"--node-rank={rank}", f"--rdzv-endpoint=127.0.0.1:{self.port}")
        return self.run(script, *place, "--rdzv-conf=join_timeout=60,last_call_timeout=30", *flags, **env)

    def nodes(self, count, nnodes, script, *flags, **env):
        return [self.node(rank, nnodes, script, *flags, **env) for rank in range(count)]

    def step(self, ranks, size, nnodes, script, *flags):
        """Agents of these ranks in a Slurm step of `size` nodes, each with an address of its own on loopback."""
        scontrol = self.dir / "scontrol"  # of a Slurm whose job has no batch script; its calls are in the file "asked"
        answer = "echo JobId=$3 JobState=RUNNING ExitCode=0:0 BatchFlag=0"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {self.dir}/asked\n{answer}\n')
        scontrol.chmod(0o755)
        names = f"127.0.0.[1-{size}]"
        job = {"SLURM_JOB_ID": str(self.port), "SLURM_STEP_ID": "0", "SLURM_CONF": "/nonexistent"}
        job |= {"SLURM_JOB_NODELIST": names, "SLURM_STEP_NODELIST": names, "SLURM_TASKS_PER_NODE": f"1(x{size})"}
        job |= {"SLURM_JOB_END_TIME": str(int(time.time()) + 36_000), "NVRX_TOKEN": "5" * 64}
        job |= {"PATH": f"{self.dir}:{os.environ['PATH']}"}
        place = (f"--nnodes={nnodes}", *flags)
        nodes = {rank: {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"127.0.0.{rank + 1}"} for rank in ranks}
        return [self.run(script, *place, **job, **node) for node in nodes.values()]

    @property
    def result(self):
        return dict(json.loads((self.run_dir / "result.json").read_text()))

    @property
    def run_dir(self):
        """Directory of the one run (job and Slurm restart) below the log directory."""
        runs = [path.parent for path in self.logs.glob("*/r0/events")]
        assert len(runs) == 1, runs
        return runs[0]

    def log(self, cycle, rank, kind):
        found = list(self.run_dir.glob(f"cycle_{cycle}/node_*/rank_{rank}.{kind}"))
        assert len(found) == 1, found
        return found[0].read_text(errors="replace")

    def close(self):
        """Reap all launchers, then fail if anything of ours is left: processes, or sockets in TMPDIR."""
        for fd in self._opened:
            os.close(fd)
        unfinished = [one.pid for one in self.launchers if one.process.returncode is None]
        for one in self.launchers:
            if one.pid in unfinished:
                one.process.kill()
                one.wait()
            print(f"--- {one.pid}\n{one.text}")  # pytest shows it where a test fails
            one.close()
        left = await_end(running_with(f"{MARK}={self.mark}"), ORPHAN_S)
        for process in left:
            init.signal_process(process, signal.SIGKILL)
        assert not unfinished, f"launchers that the test did not wait for: {unfinished}"
        assert not left, f"processes left behind: {left}"
        if any(one.process.returncode == -signal.SIGKILL for one in self.launchers):
            return  # what a killed agent left in TMPDIR is removed by the next one
        files = sorted(str(path) for path in (self.dir / "tmp").rglob("*"))
        assert not files, f"left in TMPDIR: {files}"
