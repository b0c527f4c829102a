"""One call of a wrapped function on one rank: does what `core/inprocess/phases.py` says, one step after the other."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from nvrx_slurm.core.inprocess import phases
from nvrx_slurm.core.inprocess.rollcall import Outcome, Stand, Verdict, Word
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe, message
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.exception import BarrierTimeout, InternalError, RankDiscarded, RestartError
from nvrx_slurm.inprocess.exception import TimeoutError as RestartTimeout
from nvrx_slurm.inprocess.helpers import Helpers
from nvrx_slurm.inprocess.meeting.barriers import ENTRY, Round, coordinate
from nvrx_slurm.inprocess.meeting.coordinator import overdue_slack_s
from nvrx_slurm.inprocess.meeting.stand_in import Meeting
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView
from nvrx_slurm.inprocess.monitor_thread import Answer
from nvrx_slurm.inprocess.plugins.health_check import failing_health_check
from nvrx_slurm.inprocess.plugins.rank_assignment import RankAssignmentCtx, assign
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.watch.progress import COUNTED, GONE, ROUND, STOPPING, WATCHED, OwnTime
from nvrx_slurm.inprocess.watch.stopping import RankShouldRestart, Stopper, nudges, was_stopped, way_out

logger = logging.getLogger(__name__)

_GAVE_UP = ": base exception: RestartAbort: "  # in the sentence about a rank that raised that


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
        self._this: Round | None = None
        self._verdict = Verdict(Outcome.NEXT, gone=helpers.me.gone)
        self._came_to: Round | None = None  # the last round whose barrier this rank came to
        self._end: Answer | None = None  # of the iteration: what the monitor thread was asked for
        self._value: Any = None
        self._error: BaseException | None = None
        self._cause: BaseException | None = None  # what interrupted the last iteration
        self.finished = False

    def run(self, function: Callable[[], Any]) -> Any:
        """What the function returned on this rank (None on a reserve); raises why this rank left."""
        self._function = function
        machine = phases.Restarts(time.monotonic())
        event: object = phases.Called()
        with nudges():
            try:
                while commands := machine.step(event, time.monotonic()):
                    event = self._do(commands[0].what)
            except BaseException as error:  # a signal's exception between two steps
                if not self._page.is_of_another:
                    self._error = error
                    self.leave()
                raise
        if machine.state is phases.Phase.DONE:
            self.finished = True
            return self._value
        assert self._error is not None
        self._blame(self._error)
        raise self._error

    def _do(self, what: str) -> object:
        logger.debug("%s", what)
        try:
            return getattr(self, what)()
        except BaseException as error:
            if what == "leave" or self._page.is_of_another:
                raise
            self._error = self._of_who_is_gone(error)
            self._page.words[WATCHED] = 0  # a signal's exception may have come before that was done
            return phases.Failed()

    def _of_who_is_gone(self, error: BaseException) -> BaseException:
        """Who has been away while the others went on without it waits for what never comes, or for what was deleted."""
        if not self._page.words[GONE] or not isinstance(error, (StoreLost, TimeoutError, RestartTimeout)):
            return error
        discarded = RankDiscarded(f"the others have declared rank {self._helpers.me.rank} gone, and gone on")
        discarded.__cause__ = error
        return discarded

    def _blame(self, error: BaseException) -> None:
        """Its cause chain ends with what interrupted the run, the same on every rank."""
        chain, causes = _chain(error), _chain(self._cause)
        last = chain[-1]
        if causes and last.__context__ is None and not any(one is cause for one in chain for cause in causes):
            last.__cause__ = self._cause

    # --- barriers -----------------------------------------------------------------------------------------------------

    @property
    def _barrier_s(self) -> float:
        return self._arguments.seconds("barrier_timeout") + overdue_slack_s(self._arguments)

    def _come(self, this: Round, word: Word) -> phases.Released:
        """Arrive at the round's barrier and wait for all others; takes over the verdict."""
        self._came_to = this
        if not this.arrive(self._helpers.me.rank, word):
            raise RankDiscarded(f"the others have declared rank {self._helpers.me.rank} gone")
        self._page.words[STOPPING] = 0
        gone = self._verdict.gone
        patience_s = self._barrier_s + 1.0 + word.rank  # so that one after the other tries
        asked = self._thread.ask(lambda: self._wait_verdict(this, gone, patience_s))
        if this.number > ENTRY:
            gc.collect()
        verdict: Verdict = self._thread.answer(asked, patience_s + 2 * self._barrier_s)
        if verdict.outcome is not Outcome.NEXT or self._helpers.me.rank in verdict.gone:
            self._page.words[COUNTED] = 0
        if verdict.outcome is Outcome.REFUSED:
            self._helpers.has_read_the_last_verdict(len(verdict.gone))
            raise BarrierTimeout(verdict.why) if this.number == ENTRY else InternalError(verdict.why)
        if self._helpers.me.rank in verdict.gone:
            raise RankDiscarded(f"the others have declared rank {self._helpers.me.rank} gone: {verdict.why}")
        self._verdict = verdict
        return phases.Released()

    def _wait_verdict(self, this: Round, gone: frozenset[int], patience_s: float) -> Verdict:
        """In the monitor thread. Without a coordinator this rank does its work."""
        this = self._helpers.for_waiting(this)
        verdict = this.verdict(patience_s)
        if verdict is None:
            logger.warning("iteration %d: no verdict for %.0f s; this rank gives it", this.number, patience_s)
            verdict = coordinate(this, self._helpers.me.world_size, gone, self._barrier_s, lambda: None)
        return verdict

    def _word(self, stand: Stand) -> Word:
        here, before = self._state, self._before
        return Word(stand, here.rank, here.world_size, before.rank, before.world_size)

    # --- effects, in the order of an iteration ------------------------------------------------------------------------

    def enter(self) -> object:
        """The initial barrier."""
        words = self._page.words
        words[COUNTED] = 1  # if a signal ends this here, the others need not wait
        try:
            self._helpers.open()
        except Exception:  # perhaps there are two of this rank, or it is in another job
            words[COUNTED] = 0
            raise
        return self._come(Round(self._helpers.call, ENTRY), self._word(Stand.READY))

    def assign(self) -> object:
        """Rank assignment, and where the process group shall meet."""
        verdict, last = self._verdict, self._this
        if verdict.again:
            self._state.copy_from(self._before)
        if last is not None and verdict.why:
            logger.info("iteration %d was interrupted: %s", last.number, verdict.why)
        self._before = replace(self._state)
        this = self._this = Round(self._helpers.call, ENTRY + 1 if last is None else last.number + 1)
        self._page.words[ROUND] = this.number
        self._page.words[STOPPING] = time.monotonic_ns()  # who assigns ranks for ever is not ready either
        self._end = None
        self._stopper = Stopper()
        state = replace(self._state, iteration=this.number, fn_exception=None)
        view = _Assigning(this, self._helpers.call)
        try:
            context = RankAssignmentCtx(state, view, set(verdict.terminated))
            new = assign(self._arguments.rank_assignment, context)
            self._page.still_the_rank()
        except (RestartError, TimeoutError, _Disturbed) as error:
            # "end" comes before what wakes those who wait for others, and that before "ended"
            if isinstance(error, (RankDiscarded, StoreLost)) or not this.keys.check(["end"]):
                raise
            logger.info("iteration %d: ranks are assigned again: %s", this.number, message(error))
            return phases.Disturbed()
        self._page.words[STOPPING] = 0
        self._state.copy_from(new)
        self.call_wrapper.begin(self._state, self._stopper)
        return self._meet(this)

    def _meet(self, this: Round) -> object:
        environment = self._helpers.environment
        barrier_s = self._barrier_s  # a new rank 0 that assigns ranks for ever is killed before that
        environment.release()
        if self._state.active_rank == 0:
            address, port = environment.reserve(self._helpers.me.rank)
            self._helpers.monitor.meet(Meeting(this.number, port, address))
            this.publish_start(address, port)
        else:
            try:
                wait = self._helpers.for_waiting(this).await_start
                start = self._thread.call(lambda: wait(barrier_s), 2 * barrier_s)
            except TimeoutError as error:  # of rank 0, which comes to no barrier either
                this.interrupt(self._record(Interruption.EXCEPTION, describe(error)))
                start = None
            if start is None:
                self._watch(this)
                return phases.Stopped()
            address, port = start
        environment.meet_at(self._state, address, port)
        self._watch(this)
        return phases.Assigned()

    def _watch(self, this: Round) -> None:
        state, stopper = self._state.freeze(), self._stopper
        self._end = self._thread.ask(lambda: self._helpers.await_end(this, state, stopper))

    def initialize(self) -> object:
        """May this be tried?"""
        self._helpers.before_call()
        results: list[Any] = []
        event = self._guarded(lambda: results.append(self._call_plugin("initialize")), phases.Done(), phases.Faulted())
        if isinstance(event, phases.Done):
            self._refuse_other_than_state("initialize", results[0])  # another try would do the same
        return event

    def check_at_start(self) -> object:
        """The user's health check."""
        return self._guarded(lambda: self._plugin("health_check"), phases.Done(), phases.Failed())

    def run_function(self) -> None:
        """Keeps what it returns."""
        self._value = self._function()
        self._page.still_the_rank(self._value)

    def call_function(self) -> object:
        """On an active rank."""
        event = self._guarded(self.run_function, phases.Returned(), phases.Faulted())
        if isinstance(event, phases.Returned):
            _refuse_what_has_not_run(self._value)
        return event

    def run_or_wait(self) -> object:
        """The function, or nothing on a reserve."""
        if self._state.mode is Mode.ACTIVE:
            return self.call_function()
        return self._ended(None)

    def complete(self) -> object:
        """The completion barrier."""
        this, state = self._round, self._state
        this.returned(state.active_world_size or 0)
        timeout_s = self._arguments.seconds("completion_timeout")
        try:
            return self._ended(timeout_s)
        except TimeoutError:
            text = f"the function returned {timeout_s:g} s ago, but not on all ranks"
            this.interrupt(self._record(Interruption.COMPLETION_TIMEOUT, text))
            return self._ended(self._abort_s)

    def tell_fault(self) -> object:
        """To all others."""
        assert self._error is not None
        logger.error("iteration %d: the function failed on this rank", self._round.number, exc_info=self._error)
        self._round.interrupt(self._record(Interruption.EXCEPTION, describe(self._error)))
        self._cause = self._error
        return self.await_abort()

    def await_abort(self) -> object:
        """Until the monitor thread has called `abort`."""
        event = self._ended(self._abort_s)
        if isinstance(event, phases.Completed):
            self._error = self._error or InternalError("the function returned everywhere before it was stopped here")
        else:
            self._error = None
        return event

    def finalize(self) -> object:
        """The user's."""
        _let_go(self._cause)
        self._between("finalize")
        return phases.Done()

    def check(self) -> object:
        """The user's health check and those of the hardware."""
        self._between("restart_health_check")
        return phases.Done()

    def _between(self, name: str) -> None:
        """A plug-in after a fault: what it raises is raised from that one."""
        try:
            self._plugin(name)
        except Exception:
            told = self._round.cause()
            if self._state.fn_exception is None and told is not None:
                self._cause = InternalError(told.sentence())
            raise

    def arrive(self) -> object:
        """The iteration barrier."""
        event = self._come(self._round, self._word(Stand.READY))
        self._remember_cause()
        return event

    def arrive_unassigned(self) -> object:
        """The iteration barrier, for ranks to be assigned again."""
        return self._come(self._round, self._word(Stand.UNASSIGNED))

    def call_completion(self) -> object:
        """The user's."""
        self._plugin("completion")
        return phases.Done()

    def conclude(self) -> object:
        """The termination barrier."""
        event = self._come(self._round, self._word(Stand.FINISHED))
        self._helpers.all_have_finished(self._verdict.gone)
        return event

    def leave(self) -> object:
        """Tell the others, end what may block, call `terminate`."""
        assert self._error is not None
        logger.info("rank %d leaves: %s", self._helpers.me.rank, describe(self._error))
        this, words = self._this or self._came_to, self._page.words
        if words[COUNTED] and this is not None and not isinstance(self._error, StoreLost):
            try:
                self._say_goodbye(this)
                if this is not self._came_to:  # so there was no verdict without it
                    words[COUNTED] = 0
            except StoreLost as error:
                if not words[GONE]:  # else all waits have been ended
                    logger.warning("%s", error)
        self._helpers.left(describe(self._error))
        if self._state.mode is Mode.TERMINATED:
            return phases.Done()  # `terminate` has raised a BaseException: it is not called again
        self._state.mode = Mode.TERMINATED
        self._helpers.terminates()
        try:
            self._plugin("terminate")
        except Exception:
            logger.exception("terminate failed")
        return phases.Done()

    def _say_goodbye(self, this: Round) -> None:
        discarded = isinstance(self._error, RankDiscarded)
        if this.number > ENTRY and not discarded:
            base = isinstance(self._error, BaseException) and not isinstance(self._error, Exception)
            kind = Interruption.BASE_EXCEPTION if base else Interruption.TERMINATED
            assert self._error is not None
            this.interrupt(self._record(kind, describe(self._error)))
        if self._end is not None and not discarded:
            try:
                self._ended(sum(map(self._arguments.seconds, ("last_call_wait", "termination_grace_time"))))
            except (Exception, RankShouldRestart) as error:
                logger.warning("abort did not end: %s", describe(error))
        this.bury(self._helpers.me.rank)

    # --- parts --------------------------------------------------------------------------------------------------------

    @property
    def _round(self) -> Round:
        assert self._this is not None
        return self._this

    @property
    def _abort_s(self) -> float:
        return self._arguments.seconds("last_call_wait") + self._arguments.seconds("barrier_timeout")

    def _ended(self, timeout_s: float | None) -> object:
        """How the iteration ended; the answer is there when this rank's part in that is done."""
        if self._end is None:
            return phases.Interrupted()
        completed = self._thread.answer(self._end, timeout_s if timeout_s is not None else 366 * 86400.0)
        return phases.Completed() if completed else phases.Interrupted()

    def _guarded(self, function: Callable[[], Any], done: object, faulted: object) -> object:
        """Call it so that the monitor thread can stop it, and only it."""
        words, stopper = self._page.words, self._stopper
        self._page.beat()
        words[WATCHED] = 1
        try:
            try:
                stopper.run(function)
            finally:
                if not self._page.is_of_another:
                    words[WATCHED] = 0
        except BaseException as error:
            if self._page.is_of_another:
                raise
            ended_by_abort = stopper.stopping and isinstance(faulted, phases.Faulted) and isinstance(error, Exception)
            if was_stopped(error) or ended_by_abort:
                logger.debug("stopped: %s", describe(error))
                leaves_with = way_out(error)
                _let_go(error)
                if leaves_with is None:
                    return phases.Stopped()
                self._error = leaves_with
                return phases.Failed()
            if not isinstance(error, Exception):
                raise
            self._error = self._state.fn_exception = error
            return faulted
        return done

    def _plugin(self, name: str) -> None:
        self._refuse_other_than_state(name, self._call_plugin(name))

    def _call_plugin(self, name: str) -> Any:
        plugin = getattr(self._arguments, name)
        with failing_health_check() if name.endswith("health_check") else contextlib.nullcontext():
            result = plugin and plugin(self._state.freeze())
        self._page.still_the_rank()
        return result

    def _refuse_other_than_state(self, name: str, result: Any) -> None:
        """Raises InternalError."""
        if result is not None and not isinstance(result, (FrozenState, State)):
            plugin = getattr(self._arguments, name)
            raise InternalError(f"{name}: {plugin!r} returned {result!r}; it has to return the state it was given")

    def _record(self, kind: Interruption, text: str) -> InterruptionRecord:
        return InterruptionRecord(self._helpers.me.rank, kind, text)

    def _remember_cause(self) -> None:
        """The first fault, as all ranks know it; on the rank where it happened with its traceback."""
        mine = self._state.fn_exception
        if self._cause is not None and _GAVE_UP in self._verdict.why:
            return  # who left because of the last fault, a moment before this rank does, is no other one
        if mine is not None and self._verdict.why.startswith(f"rank {self._helpers.me.rank}:"):
            self._cause = mine
        else:
            self._cause = InternalError(self._verdict.why) if self._verdict.why else None


class _Disturbed(Exception):
    """A rank was lost while ranks were being assigned."""


class _Assigning(StoreView):
    """The store as a rank assignment sees it: a wait for other ranks ends when one is lost."""

    _LOOK_S = 2.0

    def __init__(self, this: Round, call: StoreView) -> None:
        stable = call.under("stable")
        keys = this.keys.under("assign", stable)
        super().__init__(keys.store, keys.prefix, stable)
        self._round = this

    def came(self, keys: Any, timeout_s: float) -> bool:
        """See `StoreView`; raises _Disturbed."""
        look_s = min(self._LOOK_S, self.look_s(timeout_s))
        waited = OwnTime(look_s)
        while not self.look(keys, look_s):
            if self._round.keys.check(["ended"]):
                raise _Disturbed("a rank was lost meanwhile")
            if waited.seconds() >= timeout_s:
                return False
        return True

    def wait(self, keys: Any, timeout: timedelta) -> None:
        """See `StoreView`; raises _Disturbed."""
        super().wait(keys, timeout)


def _refuse_what_has_not_run(value: Any) -> None:
    """Raises TypeError for what an async function returns: nothing of it has run. Another try would do the same."""
    if not inspect.iscoroutine(value) and not inspect.isasyncgen(value):
        return
    if inspect.iscoroutine(value):
        value.close()  # else Python would say that it was never awaited
    raise TypeError(
        f"the wrapped function returned {type(value).__name__.replace('_', ' ')} {value.__qualname__!r}, of which"
        " nothing has run; have it run it to its end (asyncio.run)"
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    """It and its causes, each once: users make chains that go round."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        error = error.__cause__
    return chain


def _let_go(error: BaseException | None) -> None:
    """Locals of the function's frames are freed (tensors!), though somebody may keep the exception."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
        todo += [one.__cause__, one.__context__]
