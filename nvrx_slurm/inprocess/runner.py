"""One call of a wrapped function on one rank: executes what `core/inprocess/phases.py` decides, step after step."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nvrx_slurm.core.inprocess import phases
from nvrx_slurm.core.inprocess.barrier import Arrival, BarrierResult, Outcome, Status
from nvrx_slurm.core.inprocess.phases import RestartPhase
from nvrx_slurm.inprocess import attribution
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.exception import BarrierTimeout, HealthCheckError, InternalError, RankDiscarded
from nvrx_slurm.inprocess.guard.monitor_thread import JobResult, await_end
from nvrx_slurm.inprocess.guard.call_page import COUNTED, GONE, ITERATION, STOPPING, WATCHED
from nvrx_slurm.inprocess.guard.stopping import RankShouldRestart, Stopper, stop_signals, way_out
from nvrx_slurm.inprocess.plugins.abort import forget_half_made_groups, keep_connections, release_groups
from nvrx_slurm.inprocess.plugins.rank_assignment import RankAssignmentCtx, assign
from nvrx_slurm.inprocess.resources import Resources
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.store.barriers import ENTRY, AssigningView, Iteration, RankLost, serve_barrier
from nvrx_slurm.inprocess.store.stores import StoreLost

logger = logging.getLogger(__name__)

_GAVE_UP = ": base exception: RestartAbort: "  # in the sentence about a rank that raised that
_NO_BOUND_S = 366 * 86400.0


class Runner:
    """`run(function)` calls it until it has returned on all active ranks, or this rank cannot go on."""

    def __init__(self, arguments: Arguments, resources: Resources) -> None:
        self._arguments, self._resources = arguments, resources
        self._page, self._thread = resources.page, resources.thread
        self._state = resources.state
        self.call_wrapper = CallWrapper(self._page)
        self._stopper = Stopper()
        self._begun: Iteration | None = None  # the current iteration, from the first one on
        self._result = BarrierResult(Outcome.NEXT)
        self._arrived: Iteration | None = None  # the last one whose barrier this rank has arrived at
        self._end: JobResult | None = None  # how the iteration ended, as the monitor thread says
        self._value: Any = None  # what the function returned
        self._error: BaseException | None = None  # the fault of this rank, or the reason why it leaves
        self._cause: BaseException | None = None  # why the last iteration was interrupted
        self._steps: dict[object, Callable[[], object]] = {
            RestartPhase.ENTERING: self._enter,
            RestartPhase.ASSIGNING: self._assign,
            RestartPhase.STARTING: self._start,
            RestartPhase.RUNNING: self._call_or_wait,
            RestartPhase.RETURNED: self._complete,
            RestartPhase.STOPPING: self._stop,
            RestartPhase.RECOVERING: self._recover,
            RestartPhase.ARRIVED: self._arrive_ready,
            RestartPhase.COMPLETING: self._conclude,
        }

    @property
    def _this(self) -> Iteration:
        assert self._begun is not None
        return self._begun

    def run(self, function: Callable[[], Any]) -> Any:
        """The return value of the function on this rank (None on a reserve); raises the reason why this rank left."""
        self._function = function
        machine = phases.Restarts(time.monotonic())
        event: object = phases.Called()
        with stop_signals():
            try:
                while commands := machine.step(event, time.monotonic()):
                    event = self._do(commands[0])
            except BaseException as error:  # raised by a signal handler between two steps
                self._error = error
                self._leave()
                raise
        if machine.state is RestartPhase.DONE:
            return self._value
        assert self._error is not None
        attribution.blame(self._error, self._cause)
        raise self._error

    def _do(self, phase: RestartPhase) -> object:
        logger.debug("%s", phase.name)
        if phase is RestartPhase.LEAVING:
            return self._leave()
        try:
            if self._page.words[GONE]:  # a rank that is being killed takes no part any more
                raise RankDiscarded(f"the others go on without rank {self._resources.me.rank}")
            return self._steps[phase]()
        except BaseException as error:
            self._error = error
            self._page.words[WATCHED] = 0  # the exception of a signal handler may have come before that was done
            return phases.CannotGoOn()

    # --- barriers -----------------------------------------------------------------------------------------------------

    def _arrive(self, this: Iteration, status: Status) -> phases.Released:
        """Arrive at the barrier, wait for its result, and take it over."""
        self._arrived = this
        me, here = self._resources.me.rank, self._state
        if not this.arrive(me, Arrival(status, here.rank, here.world_size)):
            raise RankDiscarded(f"the others have declared rank {me} gone")
        self._page.words[STOPPING] = 0
        gone = self._result.gone
        wait_s = self._arguments.overdue_s + 1.0 + here.rank  # one rank after the other replaces the server
        asked = self._thread.ask(lambda: self._await_result(this, gone, wait_s))
        if this.number > ENTRY:
            gc.collect()
        result: BarrierResult = self._thread.answer(asked, wait_s + 2 * self._arguments.overdue_s)
        if result.outcome is not Outcome.NEXT or me in result.gone:
            self._page.words[COUNTED] = 0
        if result.outcome is Outcome.REFUSED:
            self._resources.has_read_the_last_result(len(result.gone))
            raise BarrierTimeout(result.why) if this.number == ENTRY else InternalError(result.why)
        if me in result.gone:
            raise RankDiscarded(f"the others have declared rank {me} gone: {result.why}")
        self._result = result
        return phases.Released()

    def _await_result(self, this: Iteration, gone: frozenset[int], wait_s: float) -> BarrierResult:
        """In the monitor thread. If the barrier server is gone this rank does its work."""
        this = self._resources.for_waiting(this)
        result = this.await_result(wait_s)
        if result is None:
            logger.warning("iteration %d: no result for %.0f s; this rank serves the barrier", this.number, wait_s)
            size, overdue_s = self._resources.me.world_size, self._arguments.overdue_s
            result = serve_barrier(this, size, gone, overdue_s, closes=False)
        return result

    # --- effects, in the order of an iteration ------------------------------------------------------------------------

    def _enter(self) -> object:
        """The initial barrier."""
        words = self._page.words
        words[COUNTED] = 1  # if a signal ends this call here, the others need not wait
        try:
            self._resources.open()
        except Exception:  # there may be two processes with this rank, or it belongs to another job
            words[COUNTED] = 0
            raise
        return self._arrive(Iteration(self._resources.call, ENTRY), Status.READY)

    def _assign(self) -> object:
        """Rank assignment, and where the process group shall meet."""
        result, last = self._result, self._begun
        if last is not None and result.why:
            logger.info("iteration %d was interrupted: %s", last.number, result.why)
        this = self._begun = Iteration(self._resources.call, last.number + 1 if last else ENTRY + 1)
        self._page.words[ITERATION] = this.number
        self._page.words[STOPPING] = time.monotonic_ns()  # an assignment that never ends is bounded, too
        self._end = None
        self._stopper = Stopper()
        before = replace(self._state, iteration=this.number, fn_exception=None)
        try:
            ctx = RankAssignmentCtx(before, AssigningView(this), set(result.terminated))
            new = assign(self._arguments.rank_assignment, ctx)
        except RankLost as error:
            logger.info("iteration %d: ranks are assigned again: %s", this.number, error)
            return phases.AssignmentFailed()
        self._page.words[STOPPING] = 0
        self._state.copy_from(new)
        self.call_wrapper.begin(self._state, self._stopper)
        return self._meet(this)

    def _meet(self, this: Iteration) -> object:
        environment, barrier_s = self._resources.environment, self._arguments.overdue_s
        environment.release()
        if self._state.active_rank == 0:
            start = environment.reserve(self._resources.me.rank)
            self._resources.monitor.meet(this.number, *start)
            this.publish_start(*start)
        else:
            wait = self._resources.for_waiting(this).await_start
            start = self._thread.call(lambda: wait(barrier_s), 2 * barrier_s)
        if start is not None:
            environment.meet_at(self._state, *start)
        mine = self._resources.for_waiting(this), self._state.freeze(), self._stopper
        self._end = self._thread.ask(lambda: await_end(self._arguments, self._page, *mine))
        return phases.Assigned() if start is not None else phases.FunctionEnded()

    def _start(self) -> object:
        """`initialize` and the first health check; connections that are open now belong to the wrapper."""
        keep_connections()
        forget_half_made_groups()

        def prepare() -> None:
            self._plugin("initialize")
            self._plugin("health_check")

        return self._guarded(prepare, phases.StepDone())

    def _call_or_wait(self) -> object:
        """The function, or nothing on a reserve."""
        if self._state.mode is not Mode.ACTIVE:
            self._value = None
            return self._ended(_NO_BOUND_S)
        return self._guarded(lambda: attribution.ending_forks(self._function), phases.Returned())

    def _complete(self) -> object:
        """The completion barrier."""
        this = self._this
        this.returned(self._state.active_world_size or 0)
        timeout_s = self._arguments.completion_timeout.total_seconds()
        try:
            return self._ended(timeout_s)
        except TimeoutError:
            text = f"the function returned {timeout_s:g} s ago, but not on all ranks"
            this.interrupt(self._record(Interruption.COMPLETION_TIMEOUT, text))
            return self._ended(self._arguments.restart_s)

    def _stop(self) -> object:
        """Tell the others of a fault, and wait until the monitor thread has called `abort`."""
        if self._error is not None:
            logger.error("iteration %d: the function failed on this rank", self._this.number, exc_info=self._error)
            self._this.interrupt(self._record(Interruption.EXCEPTION, describe(self._error)))
            self._cause = self._error
        event = self._ended(self._arguments.restart_s)
        if isinstance(event, phases.Completed):
            self._error = self._error or InternalError("the function returned everywhere before it was stopped here")
        else:
            self._error = None
        return event

    def _recover(self) -> object:
        """`finalize` and the health checks: their exceptions are raised from the fault."""
        attribution.free_frames(self._cause)
        release_groups()
        try:
            self._plugin("finalize")
            self._plugin("restart_health_check")
        except Exception:
            record = self._this.cause()
            if self._state.fn_exception is None and record is not None:
                self._cause = InternalError(record.sentence())
            raise
        return phases.StepDone()

    def _arrive_ready(self) -> object:
        """The iteration barrier."""
        event = self._arrive(self._this, Status.READY)
        self._remember_cause()
        return event

    def _conclude(self) -> object:
        """`completion`, and the termination barrier."""
        self._plugin("completion")
        event = self._arrive(self._this, Status.FINISHED)
        self._resources.all_have_finished(len(self._result.gone))
        return event

    def _leave(self) -> object:
        """Tell the others, stop calls that may block, call `terminate`."""
        assert self._error is not None
        logger.info("rank %d leaves: %s", self._resources.me.rank, describe(self._error))
        this, words = self._begun or self._arrived, self._page.words
        if words[COUNTED] and this is not None and not isinstance(self._error, StoreLost):
            try:
                self._tell_leaving(this, self._error)
                if this is not self._arrived:  # so there is no result without this rank's mark
                    words[COUNTED] = 0
            except StoreLost as error:
                if not words[GONE]:  # else the watchdog has shut down the connections
                    logger.warning("%s", error)
        self._resources.left(describe(self._error))
        if self._state.mode is not Mode.TERMINATED:  # else `terminate` has raised a BaseException
            self._state.mode = Mode.TERMINATED
            try:
                self._plugin("terminate")
            except Exception:
                logger.exception("terminate failed")
        return phases.StepDone()

    def _tell_leaving(self, this: Iteration, why: BaseException) -> None:
        discarded = isinstance(why, RankDiscarded)
        if this.number > ENTRY and not discarded:
            kind = Interruption.TERMINATED if isinstance(why, Exception) else Interruption.BASE_EXCEPTION
            this.interrupt(self._record(kind, describe(why)))
        if self._end is not None and not discarded:
            try:
                given = self._arguments.last_call_wait + self._arguments.termination_grace_time
                self._ended(given.total_seconds())
            except (Exception, RankShouldRestart) as error:
                logger.warning("abort did not end: %s", describe(error))
        this.mark_gone(self._resources.me.rank)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _ended(self, timeout_s: float) -> object:
        """How the iteration ended; the monitor thread answers when `abort` has returned and the function has ended."""
        if self._end is None:
            return phases.Interrupted()
        return phases.Completed() if self._thread.answer(self._end, timeout_s) else phases.Interrupted()

    def _guarded(self, function: Callable[[], Any], done: object) -> object:
        """Call it so that the monitor thread can stop it, and nothing else; its result is in `_value`."""
        words, stopper = self._page.words, self._stopper
        self._page.beat()
        words[WATCHED] = 1
        try:
            try:
                self._value = stopper.run(function)
            finally:
                words[WATCHED] = 0
        except BaseException as error:
            wrong_result = isinstance(error, InternalError)  # another try would repeat it
            if wrong_result or not isinstance(error, (Exception, RankShouldRestart)):
                raise
            if stopper.stopping:  # a fault then is the work of `abort`
                logger.debug("stopped: %s", describe(error))
                self._error = way_out(error)
                attribution.free_frames(error)
                return phases.FunctionEnded() if self._error is None else phases.CannotGoOn()
            self._error = error
            self._state.fn_exception = error  # type: ignore[assignment]  # or RankShouldRestart of the user's
            return phases.FunctionEnded()
        return done

    def _plugin(self, name: str) -> None:
        """Call the plug-in in that argument, if there is one. A health check fails with HealthCheckError."""
        plugin = getattr(self._arguments, name)
        try:
            result = plugin and plugin(self._state.freeze())
        except Exception as error:
            if isinstance(error, HealthCheckError) or not name.endswith("health_check"):
                raise
            raise HealthCheckError(describe(error)) from error
        if result is not None and not isinstance(result, (FrozenState, State)):
            raise InternalError(f"{name}: {plugin!r} returned {result!r}; it has to return the state it was given")

    def _record(self, kind: Interruption, text: str) -> InterruptionRecord:
        return InterruptionRecord(self._resources.me.rank, kind, text)

    def _remember_cause(self) -> None:
        """The first fault, as all ranks know it; on the rank where it happened with its traceback."""
        why, mine = self._result.why, self._state.fn_exception
        if self._cause is not None and _GAVE_UP in why:
            return  # that rank gave up because of the last fault, a moment before this rank does
        if mine is not None and why.startswith(f"rank {self._resources.me.rank}:"):
            self._cause = mine
        else:
            self._cause = InternalError(why) if why else None
