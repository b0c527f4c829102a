"""A real Slurm cluster on this one machine, private and short-lived: for tests, the demo and people.

munged, slurmctld and N slurmds run from Debian's packages, or from a later Debian's (see `slurm_builds`), with their
own directory, key, socket and ports on loopback; nothing outside that directory is touched, so several clusters live
side by side. Each daemon runs below its own init (see `minicluster_init`), which makes "everything of node n3" an
exact set of processes, also for another program that attaches through ``state.json``.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import minicluster_conf as conf
import minicluster_init as init
import slurm_builds as builds
from minicluster_init import Process

from nvrx_slurm.errors import NvrxError, UsageError

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
_PATH_EXTRA = "/usr/sbin:/sbin:/usr/bin:/bin"  # where the daemons are; not on every user's PATH
_MARK = "NVRX_MINICLUSTER"  # in the daemons' environment: marks the cluster
_POLL_S = 0.2  # Slurm has no event to wait on for "node registered" or "job ended"; each look is a process
_CLIENT_S = 30.0  # bound of one sbatch, sinfo, scontrol
_NOT_ENDED = {
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "REQUEUED",
    "REQUEUE_FED", "REQUEUE_HOLD", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD",
}  # fmt: skip


class MiniClusterError(NvrxError):
    """The cluster did not do what was asked within its time; the sentence names the log to read."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: Slurm's state (e.g. COMPLETED, FAILED, CANCELLED), exit code 0..255, signal 0..64."""

    state: str
    exit_code: int
    signal: int


@final
class MiniCluster:
    """One private cluster below `root`.

    root: a directory for this cluster only, made 0700 by `up`; at most 71 bytes. nodes: 1..64 (n1..nN).
    cpus_per_node: as Slurm sees them. kill_wait_s: KillWait. die_with_owner: also end when this Python process
    ends, however it ends (for tests); otherwise the cluster lives until `down`, by whatever process.
    extra: more lines for slurm.conf. slurm: a version of `slurm_builds`, or "" for Debian's. variants: see VARIANTS.
    Raises UsageError for bad arguments. Also a context manager (up ... down).
    """

    def __init__(
        self,
        root,
        nodes=4,
        cpus_per_node=16,
        kill_wait_s=30,
        die_with_owner=False,
        extra=(),
        slurm="",
        variants=(),
    ):
        self.root = Path(root).absolute()
        self.settings = conf.Settings(nodes, cpus_per_node, kill_wait_s, tuple(extra), slurm, tuple(variants))
        self.die_with_owner = die_with_owner
        self.uid: int | None = None  # clients run as this user (and group), where this process is root's
        self._inits: dict[str, Process] = {}  # "munged", "slurmctld", "n1", ...
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # the inits that this process started and reaps
        self._lifeline: tuple[int, int] | None = None
        conf.check_root(self.root)

    # --- life ---------------------------------------------------------------------------------------------------

    @staticmethod
    def available(slurm=""):
        """None when this machine can run a minicluster of this version, else the sentence that says why not."""
        if slurm and not builds.runs(slurm):
            where = f"run scripts/minicluster up --slurm {slurm}, or scripts/test --all."
            return builds.unavailable(slurm) or f"Slurm {slurm} or a library that it needs is not installed: {where}"
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_search_path(slurm)) is None]
        if missing:
            return f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurmctld slurmd munge."
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            return "a minicluster needs Linux >= 5.3 (pidfd)."
        return None

    @classmethod
    def attach(cls, root):
        """The cluster that some process brought up below `root`; UsageError when there is none."""
        path = Path(root).absolute() / "state.json"
        try:
            state = json.loads(path.read_text())
            settings = state["settings"]
            cluster = cls(
                Path(root), settings["nodes"], settings["cpus_per_node"], settings["kill_wait_s"],
                extra=tuple(settings["extra"]), slurm=settings["slurm"], variants=tuple(settings["variants"]),
            )  # fmt: skip
            cluster._inits = {name: Process(*entry) for name, entry in state["inits"].items()}
        except FileNotFoundError:
            raise UsageError(f"minicluster: no cluster in {root}; bring one up first.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"minicluster: {path} is damaged ({error!r}); run down, then up again.") from None
        return cluster

    def up(self, timeout_s=30.0):
        """Bring the cluster up (about 1 s) and return once every node is idle.

        Raises UsageError where Slurm is missing or a cluster runs in `root` already, MiniClusterError when it is not
        up within `timeout_s` seconds; nothing is left running then.
        """
        if reason := self.available(self.settings.slurm):
            raise UsageError(f"minicluster: {reason}")
        if self.scan():
            raise UsageError(f"minicluster: {self.root} has a running cluster; run down first or use another one.")
        deadline = time.monotonic() + timeout_s
        self._make_files()
        if self.die_with_owner:
            self._lifeline = os.pipe()
        try:
            self._start("munged", *self._munged_command())
            self._wait("munged", deadline, lambda: _connects(self.munge_socket))
            self._start("slurmctld", "slurmctld", "-D", "-c")
            for name in self.settings.node_names:
                self._start(name, *self._own_names(name), "slurmd", "-D", "-N", name)
            self._wait("slurmctld", deadline, lambda: set(self._states().values()) == {"idle"})
        except BaseException:
            self.down()
            raise
        return self

    def down(self, timeout_s=10.0):
        """End everything of this cluster, at once (running jobs are killed), and verify it by a scan of /proc.

        Returns what the scan still found and then killed: empty unless another program killed an init.
        Logs stay. Raises MiniClusterError when something outlives SIGKILL for `timeout_s` seconds.
        """
        for one in self._inits.values():
            init.signal_process(one, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for one in self._inits.values():
            self._await_end(one, deadline)
        left = self.scan()
        while alive := self.scan():
            if time.monotonic() > deadline:
                raise MiniClusterError(f"minicluster: {alive} of {self.root} do not end after SIGKILL; look at them.")
            for one in alive:
                init.signal_process(one, signal.SIGKILL)
                self._await_end(one, deadline)
        if self._lifeline:
            for fd in self._lifeline:
                os.close(fd)
            self._lifeline = None
        self._inits.clear()
        (self.root / "state.json").unlink(missing_ok=True)
        return left

    def __enter__(self):
        return self.up()

    def __exit__(self, kind, error, tb):
        self.down()

    # --- nodes --------------------------------------------------------------------------------------------------

    def kill_node(self, name, timeout_s=10.0):
        """Lose node `name`: SIGKILL its slurmd, slurmstepds, their tasks and all descendants at once.

        Returns those killed, parents first, the slurmd among them; assert on it. Slurm itself notices nothing for
        SlurmdTimeout (300 s). Raises UsageError for an unknown or dead node.
        """
        target = self._inits.get(name) if name in self.settings.node_names else None
        if target is None or not _alive(target):
            raise UsageError(f"minicluster: there is no living node {name!r} in {self.root}; see status.")
        killed = init.kill_tree(target.pid)
        self._await_end(target, time.monotonic() + timeout_s)  # its init ends when it has no child left
        return killed

    def restart_node(self, name, timeout_s=30.0):
        """Bring a node (back) up, killing what is left of it first; returns once slurmctld has its registration.

        Raises UsageError for an unknown node, MiniClusterError after `timeout_s` seconds.
        """
        if name not in self.settings.node_names:
            raise UsageError(f"minicluster: no node {name!r}; nodes are {', '.join(self.settings.node_names)}.")
        if _alive(self._inits.get(name)):
            self.kill_node(name)
        since = time.strftime("%Y-%m-%dT%H:%M:%S")  # as scontrol prints times, so that text order is time order
        self._start(name, *self._own_names(name), "slurmd", "-D", "-N", name)
        self._wait(name, time.monotonic() + timeout_s, lambda: self._registered(name, since))

    def kill_controller(self, saved, timeout_s=30.0):
        """SIGKILL slurmctld once its saved state of the jobs holds the text `saved`, which it writes every 5 s.

        Slurm's commands fail until `start_controller`. Raises MiniClusterError after `timeout_s` seconds.
        """
        controller, state, deadline = (
            self._inits["slurmctld"],
            self.root / "state/job_state",
            time.monotonic() + timeout_s,
        )
        self._wait("slurmctld", deadline, lambda: state.exists() and saved.encode() in state.read_bytes())
        init.kill_tree(controller.pid)
        self._await_end(controller, deadline)

    def start_controller(self, timeout_s=30.0):
        """Start slurmctld again with its saved state. Raises MiniClusterError when it does not answer in time."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait("slurmctld", time.monotonic() + timeout_s, lambda: bool(self._states()))

    def reset(self, timeout_s=30.0):
        """Back to a fresh cluster: no job, every node alive and idle. For tests that share one.

        Raises MiniClusterError after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        if not _alive(self._inits.get("slurmctld")):
            self.start_controller()
        jobs = self.run("squeue", "-h", "-o", "%A").split()
        if jobs:
            self._cancel("--signal=KILL", "--full", *jobs)
            self._cancel(*jobs)
        for name in self.settings.node_names:
            # A lost node keeps its job "completing": only its return, or DOWN, ends that.
            if not _alive(self._inits.get(name)):
                self.restart_node(name)
        down = [name for name, state in self._states().items() if state.startswith(("down", "drain", "fail"))]
        if down:
            self.run("scontrol", "update", f"NodeName={','.join(down)}", "State=RESUME")
        self._wait("slurmctld", deadline, lambda: set(self._states().values()) == {"idle"})

    def _cancel(self, *argv):
        """Jobs that have ended by themselves meanwhile are no error; scancel goes on with the others."""
        try:
            self.run("scancel", *argv)
        except MiniClusterError as error:
            if not any(words in str(error) for words in ("Invalid job id", "already complet")):
                raise

    def status(self):
        """State of each part: "up" or "dead" for the daemons, Slurm's word for nodes, "dead, Slurm says X" if lost."""
        slurm = self._states() if _alive(self._inits.get("slurmctld")) else {}
        parts: dict[str, str] = {}
        for name in ("munged", "slurmctld", *self.settings.node_names):
            living = _alive(self._inits.get(name))
            told = slurm.get(name, "up" if name not in self.settings.node_names else "unknown")
            parts[name] = told if living else f"dead, Slurm says {slurm[name]}" if name in slurm else "dead"
        return parts

    def scan(self):
        """All living processes of this cluster's daemons and jobs, found without parent links.

        Daemons carry the mark in their environment, jobs SLURM_CONF and SLURMD_NODENAME (a person's shell and clients
        only the first); slurmstepd and slurmscriptd wipe theirs, and are known by name and working directory.
        """
        client, mark = f"SLURM_CONF={self.conf}".encode(), f"{_MARK}={self.root}".encode()
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            try:
                words = Path("/proc", entry, "environ").read_bytes().split(b"\0")
                here = os.readlink(f"/proc/{entry}/cwd") == str(self.root)
            except OSError:
                continue  # gone, or another user's
            ours = mark in words or (client in words and any(word.startswith(b"SLURMD_NODENAME=") for word in words))
            one = init.process(int(entry))
            if one and one.pid != os.getpid() and (ours or (here and one.name.startswith("slurm"))):
                found.append(one)
        return found

    # --- jobs ---------------------------------------------------------------------------------------------------

    @property
    def conf(self):
        """Path of slurm.conf."""
        return self.root / "slurm.conf"

    @property
    def munge_socket(self):
        """Path of the private munged's socket."""
        return self.root / "munge" / "s"

    def env(self):
        """What to add to the environment so that sbatch, srun, squeue, scontrol speak to this cluster."""
        # slurm.conf names the private munged, too (AuthInfo).
        return {"SLURM_CONF": str(self.conf), "PATH": _search_path(self.settings.slurm)}

    def run(self, *argv, timeout_s=_CLIENT_S):
        """Standard output of a Slurm client; MiniClusterError with its words when it fails or takes too long."""
        command = [str(word) for word in argv]
        try:
            done = subprocess.run(
                command, env=self._environment(), cwd=self.root, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, timeout=timeout_s, check=True, user=self.uid, group=self.uid,
                extra_groups=None if self.uid is None else (),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MiniClusterError(f"minicluster: {' '.join(command)} took more than {timeout_s:g} s.") from None
        except subprocess.CalledProcessError as error:
            raise MiniClusterError(f"minicluster: {' '.join(command)} failed: {error.stderr.strip()}") from None
        return done.stdout

    def submit(self, script, *args):
        """sbatch a script; returns the job id.

        script: a Path, or the text itself (starts with "#!"). args: sbatch's options. Output goes to
        ROOT/jobs/JOBID.out unless they say otherwise; the working directory is ROOT/jobs.
        """
        jobs = self.root / "jobs"
        if isinstance(script, str):
            path = jobs / f"script-{time.monotonic_ns()}.sh"
            path.write_text(script)
        else:
            path = script.absolute()
        out = self.run("sbatch", "--parsable", f"--chdir={jobs}", f"--output={jobs}/%j.out", *args, path)
        return int(out.strip().split(";")[0])

    def job(self, job_id):
        """The fields of `scontrol show job`, e.g. JobState, NodeList, ExitCode, BatchHost; an array's: "ID_TASK"."""
        return _fields(self.run("scontrol", "show", "job", "-o", str(job_id)))

    def wait_job(self, job_id, timeout_s, until=""):
        """Wait for the end of a job, or for the state `until` (e.g. "RUNNING") if that comes first.

        Raises MiniClusterError after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            fields = self.job(job_id)
            state = fields["JobState"]
            if state not in _NOT_ENDED or state == until:
                code, _, signum = fields["ExitCode"].partition(":")
                return JobEnd(state, int(code), int(signum or 0))
            if time.monotonic() > deadline:
                raise MiniClusterError(f"minicluster: job {job_id} is still {state} after {timeout_s:g} s.")
            time.sleep(_POLL_S)

    def output(self, job_id):
        """What the job's batch script printed so far (where `submit` put it)."""
        path = self.root / "jobs" / f"{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- inside -------------------------------------------------------------------------------------------------

    def _make_files(self):
        """Directories, key and slurm.conf; everything below a root that only its owner can enter."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self.root.lstat()
        if info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise UsageError(f"minicluster: {self.root} must belong to you with mode 0700; use another directory.")
        for name in ("munge", "state", "run", "log", "jobs", *(f"spool/{n}" for n in self.settings.node_names)):
            (self.root / name).mkdir(mode=0o755, parents=True, exist_ok=True)
        self.munge_socket.unlink(missing_ok=True)
        key = self.root / "munge" / "key"
        key.unlink(missing_ok=True)
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(128))
        host = socket.gethostname().partition(".")[0]
        ports = conf.free_ports(1 + self.settings.nodes)
        text = conf.render_slurm_conf(self.root, self.settings, ports, getpass.getuser(), host)
        self.conf.write_text(text)
        device = self.root / "run" / "gpu"
        if gres := conf.render_gres_conf(self.settings, device):
            for number in range(conf.DEVICES):
                with contextlib.suppress(FileExistsError):
                    device.with_name(f"gpu{number}").symlink_to("/dev/null")
            (self.root / "gres.conf").write_text(gres)
        if self.settings.slurm:  # since 23.11 slurmd looks for a cgroup plugin that the machine may not have
            (self.root / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        elif "cgroup" in self.settings.variants:
            (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")

    def _own_names(self, name):
        """What goes before the command of a node for an /etc/hosts of its own, in which its own name is loopback's."""
        if "names" not in self.settings.variants:
            return []
        hosts = self.root / "run" / f"hosts-{name}"
        others = " ".join(one for one in self.settings.node_names if one != name)
        usual = Path("/etc/hosts").read_text()  # slurmd looks for the name of the machine
        hosts.write_text(f"{usual}\n127.0.0.1 localhost {others}\n127.0.1.1 {name}\n")
        return ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]

    def _munged_command(self):
        """--force: munged refuses a socket that not all users can reach, and this one is private."""
        root = self.root
        return [
            "munged", "--foreground", "--force", f"--socket={self.munge_socket}", f"--key-file={root}/munge/key",
            f"--seed-file={root}/munge/seed", f"--pid-file={root}/run/munged.pid", f"--log-file={root}/log/munged.log",
        ]  # fmt: skip

    def _environment(self):
        """This process's environment without any other job's or cluster's variables."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "PMI", _MARK))}
        return {**clean, **self.env()}

    def _start(self, name, *command):
        """Start one daemon below its init, in a session of its own, and record it in state.json."""
        lifeline = self._lifeline[0] if self._lifeline else -1
        argv = [sys.executable, "-I", "-S", init.__file__, str(lifeline), *command]
        with open(self.root / "log" / f"{name}.out", "ab") as log:
            child = subprocess.Popen(
                argv, env={**self._environment(), _MARK: str(self.root)}, cwd=self.root, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, pass_fds=[lifeline] if lifeline >= 0 else [],
            )  # fmt: skip
        self._children[child.pid] = child
        one = init.process(child.pid)
        if one is None:
            raise MiniClusterError(f"minicluster: {name} ended at once; read {self.root}/log/{name}.out.")
        self._inits[name] = one
        state = {"settings": asdict(self.settings), "inits": self._inits}
        draft = self.root / "state.json.new"
        draft.write_text(json.dumps(state, indent=1))
        draft.replace(self.root / "state.json")

    def _wait(self, name, deadline, done):
        """Poll until `done()`; MiniClusterError when `name` has died or the monotonic `deadline` has passed."""
        while not done():
            if not _alive(self._inits[name]) or time.monotonic() > deadline:
                state = "was not ready in time" if _alive(self._inits[name]) else "ended while coming up"
                raise MiniClusterError(f"minicluster: {name} {state}; read the files in {self.root}/log.")
            time.sleep(_POLL_S)

    def _await_end(self, one, deadline):
        """Wait for the end of a process, and reap it if it is a child."""
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            fd = -1
        if fd >= 0:
            if _alive(one):
                select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(fd)
        if not _alive(one) and (child := self._children.pop(one.pid, None)):
            child.wait()

    def _states(self):
        """Node -> Slurm's state word; empty while slurmctld does not answer yet."""
        try:
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        except MiniClusterError:
            return {}
        return dict(line.split(maxsplit=1) for line in lines if " " in line)

    def _registered(self, name, since):
        fields = _fields(self.run("scontrol", "show", "node", "-o", name))
        state = fields.get("State", "DOWN")
        healthy = not any(word in state for word in ("DOWN", "UNKNOWN", "NOT_RESPONDING", "*"))
        return healthy and fields.get("SlurmdStartTime", "") >= since


def _search_path(slurm):
    """PATH with the programs of this version before all others."""
    usual = builds.without_builds(os.environ.get("PATH", ""))
    return ":".join(filter(None, [*builds.bins(slurm), usual, _PATH_EXTRA]))


def _alive(one):
    now = init.process(one.pid) if one else None
    return now is not None and one is not None and now.start == one.start


def until(done, timeout_s):
    """Ask until it is so, since Slurm has no events; whether it was in time."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _connects(path):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _fields(line):
    """KEY=VALUE words of a one-line `scontrol show`; words without "=" belong to the value before and are dropped."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
