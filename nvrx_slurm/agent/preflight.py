"""The preflight: this node is made ready and checked before every cycle, and watched all the time (decision 012).

The checks run in a process of their own (`health.resident`), which is started once and answers within milliseconds; it
also reads GPU memory (see `reclaim`), since no thread of this process may be held by a driver: it could not end then.
Nothing that it does, and no end of it, can hurt the job: only a check that fails outright makes the node unfit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.agent import reclaim
from nvrx_slurm.agent.reclaim import Reading, Reclaim
from nvrx_slurm.config import Config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import report
from nvrx_slurm.health.check import Finding, Verdict, one_line
from nvrx_slurm.system import processes

CLOSE_TIMEOUT_S = 1.0
_PREFLIGHT_S = 5.0  # for all checks of the preflight together
_NODE_SERVICE_S = 65.0  # where an nvhcd service is asked, which has 60 s
_ANSWER_MARGIN_S = 2.0  # for the process to say that time was up
_RESPAWN_S = 5.0  # doubled for each process that ends without a single answer
_MAX_RESPAWN_S = 300.0
_SELDOM = 12  # of the intervals of the watch: how often all checks of an idle node are run
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_BYTES = 1 << 16  # that a process may say on stderr in its life
# Slurm signals every process of a step; this one ignores that once it is up.
_BY_SIGNAL = {code for signum in (1, 2, 3, 10, 12, 15) for code in (-signum, 128 + signum)}
_REFUSES = "nvrx health: "
_ROOT = str(Path(__file__).resolve().parents[2])


def _program() -> tuple[str, ...]:
    """What the interpreter is to run, with our import paths and no others: packages may come by PYTHONPATH."""
    paths = [_ROOT, *(path for path in sys.path if os.path.isabs(path))]
    text = (
        f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); "
        "from nvrx_slurm.health.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return ("-I", "-c", text, os.pathsep.join(dict.fromkeys(paths)), "--serve")


@dataclass(frozen=True)
class PreflightSpec:
    """What the checks are told, and how long to wait for what."""

    arguments: tuple[str, ...]
    reclaim: Reclaim
    answer_s: float = _PREFLIGHT_S + _ANSWER_MARGIN_S
    idle_s: float = 60.0  # between two runs of all checks while the node is idle
    injected: frozenset[tuple[int, int]] = frozenset()  # (cycle, infra rank) at which the preflight fails, for tests
    sysroot: str = "/"
    program: tuple[str, ...] = field(default_factory=_program)  # for the interpreter; tests put others in its place
    checks: bool = True  # False: the process is started only to read GPU memory

    @property
    def longest_s(self) -> float:
        """How long `Preflight.prepare` may take."""
        return self.reclaim.timeout_s + _ANSWER_MARGIN_S + CLOSE_TIMEOUT_S + self.answer_s


def preflight_spec(config: Config) -> PreflightSpec:
    """What the settings say about what is done before a cycle. The wait for GPU memory does not depend on the
    checks: without checks it is done all the same (seed 000)."""
    ft = config.ft
    wait = Reclaim(ft.gpu_memory_reclaim_timeout, ft.gpu_memory_tolerance_mb, ft.gpu_memory_poll_interval)
    if not ft.node_health_checks:
        return PreflightSpec(("--no-checks",), wait, answer_s=0.0, sysroot=config.launch.sysroot, checks=False)
    deadline_s = _NODE_SERVICE_S if ft.node_health_check_endpoint else _PREFLIGHT_S
    told = ["--when=preflight", f"--sysroot={config.launch.sysroot}", f"--deadline={deadline_s:g}"]
    told += [f"--interval={ft.node_health_check_interval:g}", "--watch=gpu-recovery"]
    if ft.enable_dist_storage_healthcheck:
        told += ["--include=lustre", "--include=mounts"]
    if not ft.enable_nic_healthcheck:
        told += ["--skip=nic-ports", "--skip=gpu-nics"]
    if ft.enable_nic_monitor:
        told += ["--watch=nic-errors"]
    expected = {
        "storage_paths": ft.storage_healthcheck_path,
        "node_service": ft.node_health_check_endpoint,
        "pci_topo_file": ft.pci_topo_file,
        "link_state_path": ft.link_state_path_template,
        "link_downed_path": ft.link_down_path_template,
    }
    told += [f"--expect={name}={value}" for name, value in expected.items() if value]
    return PreflightSpec(
        tuple(told),
        wait,
        deadline_s + _ANSWER_MARGIN_S,
        _SELDOM * ft.node_health_check_interval,
        config.launch.inject_gpu_failure,
        config.launch.sysroot,
    )


class Preflight:
    """One per agent; all methods belong to the thread of the running event loop.

    start(); then `prepare` before every cycle, `working` when it begins; in the end close(). The node is idle from
    `prepare` to `working`. `on_sick(why)` is called when a watched check fails in between, or any one while it is idle.
    `say(sentence)` is for people.
    """

    def __init__(
        self,
        spec: PreflightSpec,
        infra_rank: int,
        state_dir: Path,
        say: Callable[[str], None],
        on_sick: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._infra_rank = infra_rank
        self._state_dir = state_dir
        self._say = say
        self._on_sick = on_sick
        self._loop = asyncio.get_running_loop()
        self._child: processes.Child | None = None
        self._questions = self._answers = self._errors = -1  # pipes
        self._data = self._last_words = b""
        self._answer: asyncio.Future[report.Report | None] | None = None
        self._memory: asyncio.Future[Reading | None] | None = None
        self._looking: asyncio.Task[None] | None = None  # at the idle node
        self._ended = asyncio.Event()
        self._respawn: asyncio.TimerHandle | None = None
        self._closing = asyncio.Event()
        self._said: set[str] = set()
        self._has_gpus = True  # until NVML says otherwise
        self._respawn_s = _RESPAWN_S
        self._answered = False  # ever: how the checks are set up is right
        self._refusal = "wrong arguments"
        self._error_bytes = self._unanswered = 0

    @property
    def pid(self) -> int | None:
        """Of the process that checks, None while there is none."""
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the process that checks; where none can be made, the node goes unchecked, and that is said."""
        if self._spec.checks:
            self._spawn()

    def _spawn(self) -> None:
        self._respawn = None
        command = [sys.executable, *self._spec.program, *self._spec.arguments]
        command.append(f"--state-dir={self._state_dir}")
        try:
            pipes = [os.pipe() for _ in range(3)]
            (read, self._questions), (self._answers, answer), (self._errors, error) = pipes
            try:
                with open(answer, "wb") as stdout, open(error, "wb") as stderr, open(read, "rb") as stdin:
                    self._child = processes.start(command, os.environ, stdout, stderr, stdin=stdin)
            except OSError:
                self._close_pipes()
                raise
        except OSError as error:
            self._say_once(f"this node goes unchecked: no process can be made for its health checks: {error.strerror}")
            return
        self._data = self._last_words = b""
        self._error_bytes = self._unanswered = 0
        self._ended.clear()
        for fd, read_some in ((self._answers, self._on_answer), (self._errors, self._on_error)):
            os.set_blocking(fd, False)
            self._loop.add_reader(fd, read_some)
        self._loop.add_reader(self._child.pidfd, self._on_end)

    async def prepare(self, cycle: int, used: bool) -> str:
        """Make the node ready for `cycle` and check it: why it is not fit, "" if it is. `used`: workers have run on it.

        Bounded by the reclaim timeout and the answer's. Raises UsageError for settings that the checks refuse.
        """
        self.working()
        if used:
            await self._reclaim()
        if (cycle, self._infra_rank) in self._spec.injected:
            return f"a failure was injected for cycle {cycle} (NVRX_INJECT_GPU_FAILURE)"
        found = await self._ask()
        why = "" if found is None else self._judge(found)
        if not why and self._spec.checks and not self._closing.is_set():
            self._looking = self._loop.create_task(self._look_while_idle())
        return why

    def working(self) -> None:
        """The node is not idle any more: what is not watched is no reason to interrupt it."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look_while_idle(self) -> None:
        """A spare that nobody needs may wait for days; who is to be promoted is asked anew all the same."""
        while True:
            await asyncio.sleep(self._spec.idle_s)
            try:
                found = await self._ask()
            except UsageError:  # the next `prepare` tells
                return
            if found is not None and (why := self._judge(found)):
                self._on_sick(why)
                return

    async def close(self) -> None:
        """End the process. Bounded, never raises."""
        self._closing.set()
        self.working()
        if self._respawn is not None:
            self._respawn.cancel()
        if self._questions >= 0:
            os.close(self._questions)  # it ends at the end of its questions
            self._questions = -1
        if self._child is None:
            return
        await self._until_gone()
        if self._child is not None:
            self._kill()
            await self._until_gone()

    async def _until_gone(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended.wait(), CLOSE_TIMEOUT_S)

    # --- questions and answers ------------------------------------------------------------------------------

    def _can_ask(self) -> bool:
        """Whether there is a process that can be asked; one is started if there is none."""
        if self._child is None and not self._closing.is_set():
            self._spawn()
        return self._child is not None and not self._closing.is_set()

    async def _ask(self) -> report.Report | None:
        """None: it cannot tell."""
        if not self._spec.checks or not self._can_ask():
            return None
        self._answer = answer = self._loop.create_future()
        try:
            os.write(self._questions, b"check\n")
            self._unanswered += 1
            return await asyncio.wait_for(answer, self._spec.answer_s)
        except BrokenPipeError:  # its end is about to be seen
            await asyncio.wait({answer}, timeout=CLOSE_TIMEOUT_S)
            return answer.result() if answer.done() else None
        except asyncio.TimeoutError:
            self._say_once(f"health checks did not answer within {self._spec.answer_s:g} s; going on without")
            self._kill()
            return None
        finally:
            if self._answer is answer:  # else somebody has asked since this one was given up
                self._answer = None

    def _on_answer(self) -> None:
        *lines, self._data = (self._data + self._read(self._answers)).split(b"\n")
        for line in lines:
            try:
                asked = self._take(line.decode(errors="replace"))
            except ValueError as error:
                self._say_once(f"health checks said what they should not: {error}")
                self._kill()
                return
            if asked is not None:
                self._answered, self._respawn_s = True, _RESPAWN_S
                self._unanswered = max(0, self._unanswered - 1)  # of what is left somebody waits for the last one only
                if self._answer is not None and not self._answer.done() and not self._unanswered:
                    self._answer.set_result(asked)
        if len(self._data) > _MAX_LINE_BYTES:
            self._say_once("health checks said what they should not: a line without an end")
            self._kill()

    def _take(self, line: str) -> report.Report | None:
        """The report of the checks if it was asked for; else it is of GPU memory, or a watched check has failed."""
        reading = reclaim.from_json(line)
        if reading is not None:
            if self._memory is not None and not self._memory.done():
                self._memory.set_result(reading)
            return None
        found = report.from_json(line)
        if json.loads(line).get("asked"):
            return found
        if why := self._judge(found):
            self._on_sick(why)
        return None

    def _on_error(self) -> None:
        more = self._read(self._errors)
        self._error_bytes += len(more)
        if self._error_bytes > _MAX_ERROR_BYTES:
            self._say_once("health checks write too much to stderr")
            self._kill()
            return
        *lines, self._last_words = (self._last_words + more).split(b"\n")
        for line in lines:
            text = one_line(line.decode(errors="replace"))
            if text.startswith(_REFUSES) and not self._answered:
                self._refusal = text.removeprefix(_REFUSES)
            else:
                self._say_once(text)

    def _read(self, fd: int) -> bytes:
        try:
            more = os.read(fd, 65536)
        except BlockingIOError:
            return b""
        if not more:
            self._loop.remove_reader(fd)
        return more

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal_group(9)

    def _on_end(self) -> None:
        """It is gone: nobody asked for that, unless we are closing."""
        child = self._child
        assert child is not None
        self._loop.remove_reader(child.pidfd)
        self._on_answer()
        self._on_error()
        code = child.reap()
        self._child = None
        self._close_pipes()
        self._ended.set()
        if self._memory is not None and not self._memory.done():
            self._memory.set_result(None)
        answer, refused = self._answer, code == report.EXIT_USAGE and not self._answered
        if answer is not None and not answer.done():
            if refused:
                answer.set_exception(UsageError(f"the health checks cannot be run: {self._refusal}"))
            else:
                answer.set_result(None)
        if not self._closing.is_set() and not refused:
            if code not in _BY_SIGNAL:
                self._say_once(f"the process of the health checks ended with {code}; it is started again")
            self._respawn = self._loop.call_later(self._respawn_s, self._start_again)
            self._respawn_s = min(2 * self._respawn_s, _MAX_RESPAWN_S)

    def _start_again(self) -> None:
        if self._child is None and not self._closing.is_set():
            self.start()

    def _close_pipes(self) -> None:
        for fd in (self._questions, self._answers, self._errors):
            if fd >= 0:
                self._loop.remove_reader(fd)
                os.close(fd)
        self._questions = self._answers = self._errors = -1

    # --- what is made of them -------------------------------------------------------------------------------

    def _judge(self, found: report.Report) -> str:
        """Why the node is not fit, or "". What the checks could not tell is said, and changes nothing."""
        unfit: list[Finding] = []
        for finding in found.findings:
            if finding.verdict is Verdict.FAIL and finding.action in report.GRAVE:
                unfit.append(finding)
            elif finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN):
                word = "cannot tell" if finding.verdict is Verdict.UNKNOWN else "warns"
                self._say_once(f"health check {finding.check} {word}: {finding.text}")
        for note in found.notes:
            self._say_once(f"health checks: {note}")
        return one_line("; ".join(f"{finding.check}: {finding.text}" for finding in unfit))

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said and len(self._said) < 1000:
            self._said.add(sentence)
            self._say(sentence)

    async def _reclaim(self) -> None:
        """Wait for the GPU memory of workers that are gone."""
        if not self._has_gpus or self._spec.reclaim.timeout_s <= 0:
            return
        ended = await reclaim.wait_until_free(self._spec.reclaim, self._read_memory, self._closing)
        self._has_gpus = ended.there
        if ended.there and not self._closing.is_set():
            self._say(ended.text if ended.free else f"{ended.text}; going on all the same")

    async def _read_memory(self, seconds: float) -> Reading:
        """One reading by the process of the checks, which has to answer within `seconds`, whatever the driver does."""
        gone = Reading({}, "there is no process that reads it")
        if not self._can_ask():
            return gone
        self._memory = answer = self._loop.create_future()
        try:
            os.write(self._questions, f"memory {seconds:.3f}\n".encode())
            return await asyncio.wait_for(answer, seconds + _ANSWER_MARGIN_S) or gone
        except BrokenPipeError:  # its end is about to be seen
            await asyncio.wait({answer}, timeout=CLOSE_TIMEOUT_S)
            return gone
        except asyncio.TimeoutError:
            self._kill()
            await self._until_gone()
            return Reading({}, f"its process did not answer within {seconds + _ANSWER_MARGIN_S:.1f} s")
        finally:
            self._memory = None
