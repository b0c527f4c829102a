"""One call of a wrapped function on one rank: executes what `core/inprocess/phases.py` decides, step after step."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nvrx_slurm.core.inprocess import phases
from nvrx_slurm.core.inprocess.barrier import Arrival, BarrierResult, Outcome, Status
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.assigning import assign_ranks
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe, message
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.exception import BarrierTimeout, InternalError, RankDiscarded
from nvrx_slurm.inprocess.faults import blame, ending_forks, free_frames, without_our_frames
from nvrx_slurm.inprocess.guard.monitor_thread import Answer, await_end
from nvrx_slurm.inprocess.guard.page import COUNTED, GONE, ITERATION, STOPPING, WATCHED
from nvrx_slurm.inprocess.guard.stopping import RankShouldRestart, Stopper, nudges, was_stopped, way_out
from nvrx_slurm.inprocess.plugins.abort import forget_half_made_groups, keep_connections, release_groups
from nvrx_slurm.inprocess.plugins.health_check import failing_health_check
from nvrx_slurm.inprocess.resources import Helpers
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.store.barriers import ENTRY, Iteration, serve_barrier
from nvrx_slurm.inprocess.store.view import StoreLost

logger = logging.getLogger(__name__)

_GAVE_UP = ": base exception: RestartAbort: "  # in the sentence about a rank that raised that
_NO_BOUND_S = 366 * 86400.0


class Runner:
    """`run(function)` calls it until it has returned on all active ranks, or this rank cannot go on."""

    def __init__(self, arguments: Arguments, helpers: Helpers) -> None:
        self._arguments, self._helpers = arguments, helpers
        self._page = helpers.page
        self._thread = helpers.thread
        self._state = helpers.state
        self._before = replace(self._state)  # as assigned for the iteration before
        self.call_wrapper = CallWrapper(self._page)
        self._stopper = Stopper()
        self._this: Any = None  # the Iteration, from the first one on
        self._result = BarrierResult(Outcome.NEXT)
        self._arrived: Iteration | None = None  # the last one whose barrier this rank has arrived at
        self._end: Answer | None = None  # of the iteration, from the monitor thread
        self._value: Any = None
        self._error: Any = None  # the reason why this rank leaves, or its fault
        self._cause: BaseException | None = None  # of the interruption of the last iteration

    def run(self, function: Callable[[], Any]) -> Any:
        """The return value of the function on this rank (None on a reserve); raises the reason why this rank left."""
        self._function = function
        machine = phases.Restarts(time.monotonic())
        event: object = phases.Called()
        with nudges():
            try:
                while commands := machine.step(event, time.monotonic()):
                    event = self._do(commands[0].what)
            except BaseException as error:  # of a signal handler, between two steps
                self._error = error
                self.leave()
                raise
        if machine.state is phases.Phase.DONE:
            return self._value
        blame(self._error, self._cause)
        raise self._error

    def _do(self, what: str) -> object:
        logger.debug("%s", what)
        try:
            if self._page.words[GONE] and what != "leave":  # a rank that is being killed takes no part any more
                raise RankDiscarded(f"the others go on without rank {self._helpers.me.rank}")
            return getattr(self, what)()
        except BaseException as error:
            if what == "leave":
                raise
            self._error = error
            self._page.words[WATCHED] = 0  # the exception of a signal handler may have come before that was done
            return phases.Failed()

    # --- barriers -----------------------------------------------------------------------------------------------------

    def _arrive(self, this: Iteration, status: Status) -> phases.Released:
        """Arrive at the barrier, wait for its result, and take it over."""
        self._arrived = this
        me, here, before = self._helpers.me.rank, self._state, self._before
        arrival = Arrival(status, here.rank, here.world_size, before.rank, before.world_size)
        if not this.arrive(me, arrival):
            raise RankDiscarded(f"the others have declared rank {me} gone")
        self._page.words[STOPPING] = 0
        gone = self._result.gone
        patience_s = self._arguments.overdue_s + 1.0 + here.rank  # one rank after the other replaces the server
        asked = self._thread.ask(lambda: self._await_result(this, gone, patience_s))
        if this.number > ENTRY:
            gc.collect()
        result: BarrierResult = self._thread.answer(asked, patience_s + 2 * self._arguments.overdue_s)
        if result.outcome is not Outcome.NEXT or me in result.gone:
            self._page.words[COUNTED] = 0
        if result.outcome is Outcome.REFUSED:
            self._helpers.has_read_the_last_result(len(result.gone))
            raise BarrierTimeout(result.why) if this.number == ENTRY else InternalError(result.why)
        if me in result.gone:
            raise RankDiscarded(f"the others have declared rank {me} gone: {result.why}")
        self._result = result
        return phases.Released()

    def _await_result(self, this: Iteration, gone: frozenset[int], patience_s: float) -> BarrierResult:
        """In the monitor thread. If the barrier server is gone this rank does its work."""
        this = self._helpers.for_waiting(this)
        result = this.await_result(patience_s)
        if result is None:
            logger.warning("iteration %d: no result for %.0f s; this rank serves the barrier", this.number, patience_s)
            size, overdue_s = self._helpers.me.world_size, self._arguments.overdue_s
            result = serve_barrier(this, size, gone, overdue_s, lambda: None)
        return result

    # --- effects, in the order of an iteration ------------------------------------------------------------------------

    def enter(self) -> object:
        """The initial barrier."""
        words = self._page.words
        words[COUNTED] = 1  # if a signal ends this call here, the others need not wait
        try:
            self._helpers.open()
        except Exception:  # there may be two processes with this rank, or it belongs to another job
            words[COUNTED] = 0
            raise
        return self._arrive(Iteration(self._helpers.call, ENTRY), Status.READY)

    def assign(self) -> object:
        """Rank assignment, and where the process group shall meet."""
        result, last = self._result, self._this
        if result.again:
            self._state.copy_from(self._before)
        if last is not None and result.why:
            logger.info("iteration %d was interrupted: %s", last.number, result.why)
        self._before = replace(self._state)
        this = self._this = Iteration(self._helpers.call, last.number + 1 if last else ENTRY + 1)
        self._page.words[ITERATION] = this.number
        self._page.words[STOPPING] = time.monotonic_ns()  # an assignment that never ends is bounded, too
        self._end = None
        self._stopper = Stopper()
        new = assign_ranks(self._arguments.rank_assignment, this, self._state, result.terminated)
        if isinstance(new, Exception):
            logger.info("iteration %d: ranks are assigned again: %s", this.number, message(new))
            return phases.Disturbed()
        self._page.words[STOPPING] = 0
        self._state.copy_from(new)
        self.call_wrapper.begin(self._state, self._stopper)
        return self._meet(this)

    def _meet(self, this: Iteration) -> object:
        environment, barrier_s = self._helpers.environment, self._arguments.overdue_s
        environment.release()
        if self._state.active_rank == 0:
            start = environment.reserve(self._helpers.me.rank)
            self._helpers.monitor.meet(this.number, *start)
            this.publish_start(*start)
        else:
            wait = self._helpers.for_waiting(this).await_start
            start = self._thread.call(lambda: wait(barrier_s), 2 * barrier_s)
        if start is not None:
            environment.meet_at(self._state, *start)
        mine = self._helpers.for_waiting(this), self._state.freeze(), self._stopper
        self._end = self._thread.ask(lambda: await_end(self._arguments, self._page, *mine))
        return phases.Assigned() if start is not None else phases.Stopped()

    def initialize(self) -> object:
        """The user's `initialize`; connections that are open now belong to the wrapper and not to the function."""
        keep_connections()
        forget_half_made_groups()
        results: list[Any] = []
        event = self._guarded(lambda: results.append(self._call_plugin("initialize")), phases.Done(), phases.Faulted())
        if isinstance(event, phases.Done):
            self._check_result("initialize", results[0])  # a wrong result is no fault: another try would repeat it
        return event

    def check_at_start(self) -> object:
        """The user's health check."""
        return self._guarded(lambda: self._plugin("health_check"), phases.Done(), phases.Faulted())

    def run_or_wait(self) -> object:
        """The function, or nothing on a reserve."""
        if self._state.mode is not Mode.ACTIVE:
            return self._ended(_NO_BOUND_S)

        def call() -> None:
            self._value = ending_forks(self._function)

        return self._guarded(call, phases.Returned(), phases.Faulted())

    def complete(self) -> object:
        """The completion barrier."""
        this = self._this
        this.returned(self._state.active_world_size or 0)
        timeout_s = self._arguments.seconds("completion_timeout")
        try:
            return self._ended(timeout_s)
        except TimeoutError:
            text = f"the function returned {timeout_s:g} s ago, but not on all ranks"
            this.interrupt(self._record(Interruption.COMPLETION_TIMEOUT, text))
            return self._ended(self._arguments.restart_s)

    def tell_fault(self) -> object:
        """Tell all others."""
        logger.error("iteration %d: the function failed on this rank", self._this.number, exc_info=self._error)
        self._this.interrupt(self._record(Interruption.EXCEPTION, describe(self._error)))
        self._cause = self._error
        return self.await_abort()

    def await_abort(self) -> object:
        """Until the monitor thread has called `abort`."""
        event = self._ended(self._arguments.restart_s)
        if isinstance(event, phases.Completed):
            self._error = self._error or InternalError("the function returned everywhere before it was stopped here")
        else:
            self._error = None
        return event

    def finalize(self) -> object:
        """The user's."""
        free_frames(self._cause)
        release_groups()
        self._between("finalize")
        return phases.Done()

    def check(self) -> object:
        """The user's health check and those of the hardware."""
        self._between("restart_health_check")
        return phases.Done()

    def _between(self, name: str) -> None:
        """A plug-in after a fault: its exceptions are raised from that fault."""
        try:
            self._plugin(name)
        except Exception:
            record = self._this.cause()
            if self._state.fn_exception is None and record is not None:
                self._cause = InternalError(record.sentence())
            raise

    def arrive(self) -> object:
        """The iteration barrier."""
        event = self._arrive(self._this, Status.READY)
        self._remember_cause()
        return event

    def arrive_unassigned(self) -> object:
        """The iteration barrier, for ranks to be assigned again."""
        return self._arrive(self._this, Status.UNASSIGNED)

    def call_completion(self) -> object:
        """The user's."""
        self._plugin("completion")
        return phases.Done()

    def conclude(self) -> object:
        """The termination barrier."""
        event = self._arrive(self._this, Status.FINISHED)
        self._helpers.all_have_finished(len(self._result.gone))
        return event

    def leave(self) -> object:
        """Tell the others, stop calls that may block, call `terminate`."""
        logger.info("rank %d leaves: %s", self._helpers.me.rank, describe(self._error))
        this, words = self._this or self._arrived, self._page.words
        if words[COUNTED] and this is not None and not isinstance(self._error, StoreLost):
            try:
                self._say_goodbye(this)
                if this is not self._arrived:  # so there is no result without this rank's tombstone
                    words[COUNTED] = 0
            except StoreLost as error:
                if not words[GONE]:  # else the watchdog has shut down the connections
                    logger.warning("%s", error)
        self._helpers.left(describe(self._error))
        if self._state.mode is Mode.TERMINATED:
            return phases.Done()  # `terminate` has raised a BaseException and is not called again
        self._state.mode = Mode.TERMINATED
        self._helpers.terminates()
        try:
            self._plugin("terminate")
        except Exception:
            logger.exception("terminate failed")
        return phases.Done()

    def _say_goodbye(self, this: Iteration) -> None:
        discarded = isinstance(self._error, RankDiscarded)
        if this.number > ENTRY and not discarded:
            kind = Interruption.TERMINATED if isinstance(self._error, Exception) else Interruption.BASE_EXCEPTION
            this.interrupt(self._record(kind, describe(self._error)))
        if self._end is not None and not discarded:
            try:
                self._ended(sum(map(self._arguments.seconds, ("last_call_wait", "termination_grace_time"))))
            except (Exception, RankShouldRestart) as error:
                logger.warning("abort did not end: %s", describe(error))
        this.write_tombstone(self._helpers.me.rank)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _ended(self, timeout_s: float) -> object:
        """How the iteration ended; the monitor thread answers when `abort` has returned and the function has ended."""
        if self._end is None:
            return phases.Interrupted()
        completed = self._thread.answer(self._end, timeout_s)
        return phases.Completed() if completed else phases.Interrupted()

    def _guarded(self, function: Callable[[], Any], done: object, faulted: object) -> object:
        """Call it so that the monitor thread can stop it, and nothing else."""
        words, stopper = self._page.words, self._stopper
        self._page.beat()
        words[WATCHED] = 1
        try:
            try:
                stopper.run(function)
            finally:
                words[WATCHED] = 0
        except BaseException as error:
            if not isinstance(error, Exception) and not was_stopped(error):
                raise
            ended_by_abort = isinstance(faulted, phases.Faulted) and isinstance(error, Exception)
            if stopper.stopping and (was_stopped(error) or ended_by_abort):
                logger.debug("stopped: %s", describe(error))
                leaves_with = way_out(error)
                free_frames(error)
                if leaves_with is None:
                    return phases.Stopped()
                self._error = leaves_with
                return phases.Failed()
            self._error = without_our_frames(error)
            self._state.fn_exception = self._error
            return faulted
        return done

    def _plugin(self, name: str) -> None:
        self._check_result(name, self._call_plugin(name))

    def _call_plugin(self, name: str) -> Any:
        plugin = getattr(self._arguments, name)
        with failing_health_check() if name.endswith("health_check") else contextlib.nullcontext():
            return plugin and plugin(self._state.freeze())

    def _check_result(self, name: str, result: Any) -> None:
        """Raises InternalError unless it is a state or None."""
        if result is not None and not isinstance(result, (FrozenState, State)):
            plugin = getattr(self._arguments, name)
            raise InternalError(f"{name}: {plugin!r} returned {result!r}; it has to return the state it was given")

    def _record(self, kind: Interruption, text: str) -> InterruptionRecord:
        return InterruptionRecord(self._helpers.me.rank, kind, text)

    def _remember_cause(self) -> None:
        """The first fault, as all ranks know it; on the rank where it happened with its traceback."""
        why, mine = self._result.why, self._state.fn_exception
        if self._cause is not None and _GAVE_UP in why:
            return  # that rank gave up because of the last fault, a moment before this rank does
        if mine is not None and why.startswith(f"rank {self._helpers.me.rank}:"):
            self._cause = mine
        else:
            self._cause = InternalError(why) if why else None
