"""Restart or give up, and after what pause: decisions with the sentence about each."""

from __future__ import annotations

import re

from nvrx_slurm.core.attribution.raised import frames
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.core.coordinator.events import Resumable
from nvrx_slurm.declared import Record, replace
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import RERUN, FaultKind, History, KindCount, Node, RankFault

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT_START_S = 120.0  # a port that another program took, and a script that cannot start, are noticed within this time
# per job; a script that binds a port of its own twice must not restart for ever
_MAX_PORT_RETRIES = 3
# starts per job that are done again because forked workers differ from executed ones
_MAX_INEXACT = 3
_MAX_RERUNS = 3  # in a row that use no restart
# A null byte is of a file that is half written.
_NOT_COMPILED = re.compile(r"(?:SyntaxError|IndentationError|TabError): (?!.*null byte)")


class RestartLimits(Record, kw_only=True):
    """What bounds the restarts of a job besides their sum (--max-restarts). All times in seconds."""

    by_kind: tuple[KindCount, ...]  # kinds that are not named share the sum only
    max_no_progress_cycles: int  # give up after so many cycles in a row; 0 = never
    min_progress_iterations: int  # what counts as progress, >= 1
    no_restart_code: int
    poison_iterations: int  # failures so soon after one checkpoint may come from it; 0 = never
    max_failed_starts: int  # that all ranks end in the same way, in a row; 0 = no bound
    stops_on_repeats: (
        bool  # end the job where the user's code fails in the same way again and again
    )
    crash_loop_s: float  # a cycle that fails sooner than this has died at its start
    crash_loop_pause_s: float  # before the third cycle that would; doubles from there; 0 = no pause
    longest_pause_s: float = 60.0

    @property
    def hopeless_code(self) -> int:
        """How a job ends that would fail again for certain."""
        return self.no_restart_code if self.stops_on_repeats else int(ExitCode.FAILED)


class Decision(Record):
    """`restart` after `pause_s` seconds, or end the job with `code`; `why` is one sentence either way."""

    restart: bool
    code: int
    why: str
    pause_s: float = 0.0


class Budget:
    """How many cycles the job may still have. `history` is what it has behind it, over all terms."""

    def __init__(self, max_restarts: int, limits: RestartLimits) -> None:
        self._max = max_restarts
        self._limits = limits
        self.history = self._before = History()  # as it was before the last restart was counted
        self._early_deaths = 0  # cycles in a row in which a rank died at its start
        self._port_retries = self._inexact = 0
        # complete checkpoints, newest first; None = not known
        self.saved: tuple[Resumable, ...] | None = None

    @property
    def may_fork(self) -> bool:
        """Whether ranks may be forked, since a start that is done again for that still uses no restart."""
        return self._inexact < _MAX_INEXACT

    def inherit(self, history: History) -> bool:
        """Take over what an agent knows of earlier terms, where it is more; whether that excludes further nodes."""
        mine = self.history
        excluded = tuple(dict.fromkeys((*mine.excluded, *history.excluded)))
        further = history if history.restarts_used > mine.restarts_used else mine
        self.history = replace(further, excluded=excluded)
        return len(excluded) > len(mine.excluded)

    def exclude(self, node: Node) -> None:
        """Do not take this node again, however often its agent comes back."""
        if not self.excludes(node):
            self.history = replace(self.history, excluded=(*self.history.excluded, _key(node)))

    def excludes(self, node: Node) -> bool:
        """Whether this node is not to be taken."""
        return _key(node) in self.history.excluded

    def after(
        self, cause: RankFault, lasted_s: float, agent_port: int = 0, reruns: int | None = None
    ) -> Decision:
        """Whether the job may start another cycle after one that lasted `lasted_s`; if so, it is counted as used.
        `agent_port`: where the agent of that node listens; 0 = it does not. `reruns`: how many cycles before this one
        have ended with RERUN in a row; None = there are no other GPUs."""
        self._before = self.history
        decided = self._without_a_restart(cause, lasted_s, agent_port, reruns)
        return decided or self._with_a_restart(cause, lasted_s)

    def _without_a_restart(
        self, cause: RankFault, lasted_s: float, agent_port: int, reruns: int | None
    ) -> Decision | None:
        """Another cycle that uses no restart, or an end that restarts cannot help; None = neither."""
        what = headline(cause)
        # Later a file may be just written.
        if lasted_s < _PORT_START_S and cannot_be_compiled(cause):
            why = f"{what}; no restart: Python would find the same error again"
            return Decision(False, self._limits.hopeless_code, why)
        lost_port = lost_its_port(cause, lasted_s)
        if agent_port and lost_port and re.search(rf"\b{agent_port}\b", cause.message):
            why = f"nvrx-run itself listens on port {agent_port} (--rdzv-endpoint, --master-port)"
            cure = "use init_method env://, or another port in the script"
            return Decision(False, ExitCode.FAILED, f"{what}; {why}: {cure}")
        if lost_port and self._port_retries < _MAX_PORT_RETRIES:
            self._port_retries += 1
            some = f"retry {self._port_retries} of {_MAX_PORT_RETRIES}, which uses no restart"
            why = f"another program took MASTER_PORT: another port, {some}"
            return Decision(True, ExitCode.OK, f"{what}; {why}")
        if cause.kind is FaultKind.INEXACT and self._inexact < _MAX_INEXACT:
            self._inexact += 1
            why = "all ranks start again, executed, which uses no restart"
            return Decision(True, ExitCode.OK, f"{what}; {why}")
        rejects = cause.kind is FaultKind.EXIT and cause.exit_code == RERUN
        if rejects and reruns is not None and reruns < _MAX_RERUNS:
            some = f"run {reruns + 1} of {_MAX_RERUNS} on other nodes, which uses no restart"
            why = f"a rejected result is to be computed again: {some}"
            return Decision(True, ExitCode.OK, f"{what}; {why}")
        return None

    def _with_a_restart(self, cause: RankFault, lasted_s: float) -> Decision:
        """Another cycle while restarts are left, in all and for faults of this kind."""
        what = headline(cause)
        used = self.history.restarts_used
        spent = {entry.kind: entry.count for entry in self.history.spent}
        allowed = {entry.kind: entry.count for entry in self._limits.by_kind}
        of_kind = spent.get(cause.kind, 0)
        left = ""
        if used >= self._max:
            none = "no restart was allowed (--max-restarts=0)"
            left = f"all {self._max} restarts are used" if self._max else none
        elif of_kind >= allowed.get(cause.kind, self._max):
            left = f"no restart for {cause.kind.value} faults is left (--ft-max-restarts-by-fault)"
        if left:
            return Decision(False, ExitCode.FAILED, f"{what}; {left}")
        spent[cause.kind] = of_kind + 1
        by_kind = tuple(KindCount(kind, spent[kind]) for kind in FaultKind if kind in spent)
        self.history = replace(self.history, restarts_used=used + 1, spent=by_kind)
        why = f"{what}; restart {used + 1} of {self._max}"
        pause_s = self._pause_s(cause, lasted_s)
        if pause_s:
            why += f" in {pause_s:g} s, because ranks die at their start again and again"
        return Decision(True, ExitCode.OK, why, pause_s)

    def refund(self) -> None:
        """The last cause allows no restart: none is used."""
        before = self._before
        self.history = replace(self.history, restarts_used=before.restarts_used, spent=before.spent)

    def _pause_s(self, cause: RankFault, lasted_s: float) -> float:
        """Ranks that die at their start again and again may need something outside (a file system, a licence): the
        next cycle starts later. Any rank may be the first. After a node's fault the next cycle starts at once."""
        if lasted_s >= self._limits.crash_loop_s:
            self._early_deaths = 0
        elif cause.rank >= 0:
            self._early_deaths += 1
        if self._early_deaths < 2 or cause.rank < 0:
            return 0.0
        longest_s, doublings = self._limits.longest_pause_s, min(self._early_deaths - 2, 30)
        return min(self._limits.crash_loop_pause_s * float(1 << doublings), longest_s)

    def found(self, saved: tuple[Resumable, ...]) -> None:
        """These checkpoints are complete, newest first: the next cycle may resume from one of them."""
        self.saved = saved
        self._aim()

    def _aim(self) -> None:
        if self.saved is not None:  # else an earlier coordinator may have known it
            before = self.history.resume_before
            path = next(
                (one.path for one in self.saved if before < 0 or one.iteration < before), ""
            )
            self.history = replace(self.history, resume_from=path)

    def begin_at(self, iteration: int | None) -> None:
        """The checkpoint that the job begins with; None = none is known."""
        if iteration is not None and self.history.iteration < 0:
            self.history = replace(self.history, iteration=iteration)

    def resume_before(self, iteration: int) -> None:
        """Ranks are told to take a checkpoint older than this one, until a later one is the last one."""
        self.history = replace(self.history, resume_before=iteration, iteration=-1)
        self._aim()

    def score(self, iteration: int | None) -> Decision | None:
        """A cycle has ended with a checkpoint of `iteration` (None: unreadable, not scored); None = go on."""
        if iteration is None:
            return None
        told = self.history.resume_before
        if told >= 0 and iteration == told:
            return None  # that old checkpoint is no progress, and none was to be expected
        if 0 <= told < iteration:
            self.history = replace(self.history, resume_before=-1)
            self._aim()
        before = self.history.iteration
        if before < 0 or iteration - before >= self._limits.min_progress_iterations:
            self.history = replace(self.history, iteration=iteration, no_progress=0)
            return None
        cycles = self.history.no_progress + 1
        self.history = replace(self.history, no_progress=cycles)
        allowed = self._limits.max_no_progress_cycles
        if not 0 < allowed <= cycles:
            return None
        why = (
            f"no progress in {cycles} cycles: the last checkpoint is of iteration {iteration},"
            f" {before + self._limits.min_progress_iterations} or more was expected"
        )
        return Decision(False, self._limits.no_restart_code, why)


def lost_its_port(cause: RankFault, lasted_s: float) -> bool:
    """Whether rank 0 could not listen on MASTER_PORT, which another program may take with SO_REUSEADDR."""
    said = f"{cause.message}\n{cause.traceback}"
    return cause.rank == 0 and lasted_s < _PORT_START_S and _PORT_TAKEN.search(said) is not None


def cannot_be_compiled(cause: RankFault) -> bool:
    """Whether the exception that ended the rank is a syntax error in a file of the user, not of a library."""
    found = frames(cause.traceback)[:1] if _NOT_COMPILED.match(cause.message) else []
    return cause.kind is FaultKind.EXIT and any(not library for _, library in found)


def _key(node: Node) -> str:
    """What an excluded node is known by in `History.excluded`, over all lives of its agent."""
    return f"{node.infra_rank}@{node.host}"
