"""Everything that can go wrong. Each fault picks its victim, does its harm and says so; None = there was no victim.

`strike(world)` lets one happen, of a kind drawn with the world's own seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_slurm.core.job.agent import State
from nvrx_slurm.core.job.agent_events import RankAsked, Sick, Signalled, Warned
from nvrx_slurm.types import FaultKind, WorkloadAction

from .network import AGENT_KEEPALIVE_S, COORDINATOR_KEEPALIVE_S

if TYPE_CHECKING:
    from .processes import SimAgent, Worker
    from .world import World

Fault = Callable[["World"], "str | None"]
KINDS: dict[str, tuple[Fault, int]] = {}  # by name, with how often it comes relative to the others
_TRIES = 5


def _kind(weight: int = 4) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        KINDS[fault.__name__.replace("_", "-")] = (fault, weight)
        return fault

    return register


def strike(world: World) -> None:
    """Let something go wrong; another kind if the first has no victim just now."""
    names = list(world.settings.kinds or KINDS)
    weights = [KINDS[name][1] for name in names]
    for _ in range(_TRIES):
        name = world.rng.choices(names, weights)[0]
        if world.story is not None:
            world.story.mark()  # the fault is told before what follows from it
        sentence = KINDS[name][0](world)
        if sentence is not None:
            world.happens(name, sentence)
            return


# --- victims ---------------------------------------------------------------------------------------------


def _some_agent(world: World) -> SimAgent | None:
    agents = world.living_agents()
    return world.rng.choice(agents) if agents else None


def _some_worker(world: World) -> Worker | None:
    agents = [agent for agent in world.living_agents() if agent.core.state is State.RUNNING and agent.living()]
    return world.rng.choice(world.rng.choice(agents).living()) if agents else None


def _name(worker: Worker) -> str:
    return f"rank {worker.rank} on {worker.agent.host.name}"


# --- workers -----------------------------------------------------------------------------------------------


@_kind()
def worker_killed(world: World) -> str | None:
    """Out of memory, say."""
    worker = _some_worker(world)
    if worker is None:
        return None
    world.training.die_with(worker)
    worker.die(-9, "SIGKILL")
    return f"{_name(worker)} is killed"


@_kind()
def worker_exits(world: World) -> str | None:
    """An exception in user code."""
    worker = _some_worker(world)
    if worker is None:
        return None
    world.training.die_with(worker)
    worker.die(world.rng.choice((1, 3, 77)), "ValueError: loss is NaN")
    return f"{_name(worker)} exits with an error"


@_kind()
def worker_hangs(world: World) -> str | None:
    """Its monitor notices and kills it; the word of either may come first."""
    worker = _some_worker(world)
    if worker is None:
        return None
    world.training.stall(worker.run)
    world.clock.after(world.rng.uniform(0.0, 0.05), worker.seem_hung)
    world.clock.after(world.rng.uniform(0.02, 0.1), worker.die, -9, "no heartbeat for 30 s", FaultKind.HANG)
    return f"{_name(worker)} hangs"


@_kind()
def false_alarm(world: World) -> str | None:
    """A rank that seems hung at its very end finishes before its monitor gets to kill it."""
    if world.training.false_alarm:
        return None
    world.training.false_alarm = True
    return "a monitor will take a rank that is about to finish for hung"


@_kind()
def worker_stuck(world: World) -> str | None:
    """Uninterruptible sleep: not even SIGKILL ends it."""
    worker = _some_worker(world)
    if worker is None:
        return None
    world.training.stall(worker.run)
    worker.stuck = True
    worker.seem_hung()
    return f"{_name(worker)} hangs in the kernel (D state)"


@_kind()
def slow_to_stop(world: World) -> str | None:
    """Its workers ignore SIGTERM, now and in the future."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.stubborn = True
    for worker in agent.living():
        worker.stubborn = True
    return f"workers on {agent.host.name} ignore SIGTERM from now on"


@_kind()
def warned(world: World) -> str | None:
    """Slurm's early warning; harmless."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.step(Warned(10))
    return f"{agent.host.name} gets SIGUSR1"


# --- requests of ranks -------------------------------------------------------------------------------------


def _ask(world: World, action: WorkloadAction) -> str | None:
    worker = _some_worker(world)
    if worker is None:
        return None
    worker.agent.step(RankAsked(worker.local_rank, action, "so it wants"))
    return f"{_name(worker)} asks: {action.name}"


@_kind(weight=2)
def asks_to_continue(world: World) -> str | None:
    """Only noted."""
    return _ask(world, WorkloadAction.Continue)


@_kind()
def asks_to_exclude(world: World) -> str | None:
    """A rank takes its own node for sick; its agent may come back all the same."""
    worker = _some_worker(world)
    if worker is None:
        return None
    worker.agent.step(RankAsked(worker.local_rank, WorkloadAction.ExcludeThisNode, "so it wants"))
    delay_s = world.rng.uniform(0.5, 40.0)
    world.clock.after(delay_s, world.start_agent, worker.agent.host)
    world.busy_until(world.clock.now + delay_s)
    return f"{_name(worker)} asks to exclude {worker.agent.host.name}, which comes back in {delay_s:.1f} s"


@_kind(weight=1)
def asks_to_shut_down(world: World) -> str | None:
    """A rank knows that going on makes no sense."""
    return _ask(world, WorkloadAction.ShutdownWorkload)


# --- nodes -------------------------------------------------------------------------------------------------


@_kind()
def agent_crashes(world: World) -> str | None:
    """SIGKILL to the agent; the kernel resets its connections."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.crash(in_flight=world.rng.random() < 0.5)
    return f"the agent on {agent.host.name} is killed"


@_kind()
def host_vanishes(world: World) -> str | None:
    """Power failure: only silence."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.vanish()
    return f"{agent.host.name} loses power"


@_kind()
def node_sick(world: World) -> str | None:
    """A health check fails, while the node runs workers or waits, or not before it is to be used again."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.host.sick = "GPU 3 is lost"
    at_once = world.rng.random() < 0.5
    if at_once:
        agent.step(Sick(agent.host.sick))
    return f"{agent.host.name} is sick, which is seen {'at once' if at_once else 'when it is checked'}"


@_kind()
def comes_back(world: World) -> str | None:
    """A node dies and is back as a new life, possibly before anybody missed it."""
    agent = _some_agent(world)
    if agent is None:
        return None
    if world.rng.random() < 0.5:
        agent.vanish()
    else:
        agent.crash(in_flight=False)
    delay_s = world.rng.uniform(0.01, 8.0)
    world.clock.after(delay_s, world.start_agent, agent.host)
    world.busy_until(world.clock.now + delay_s)
    return f"{agent.host.name} reboots and will be back in {delay_s:.1f} s"


@_kind()
def late_join(world: World) -> str | None:
    """A host that has no agent yet, or none any more, gets one."""
    idle = [host for host in world.hosts if host.agent is None or not host.agent.alive]
    if not idle or world.over:
        return None
    host = world.rng.choice(idle)
    world.start_agent(host)
    return f"a new agent starts on {host.name}"


# --- the network ---------------------------------------------------------------------------------------------


@_kind()
def slow_network(world: World) -> str | None:
    """Messages of one host take up to seconds."""
    agent = _some_agent(world)
    if agent is None:
        return None
    agent.host.slow_until = world.clock.now + world.rng.uniform(1.0, 20.0)
    world.busy_until(agent.host.slow_until)
    return f"the network of {agent.host.name} crawls for {agent.host.slow_until - world.clock.now:.1f} s"


@_kind()
def stream_resets(world: World) -> str | None:
    """A connection breaks, what is under way is lost, and both ends live."""
    agent = _some_agent(world)
    if agent is None or agent.stream is None:
        return None
    stream = agent.stream
    ends = [stream.break_at_agent, stream.break_at_coordinator]
    world.rng.shuffle(ends)
    ends[0]("connection reset")
    world.clock.after(world.rng.choice((0.0, 0.001, 0.1)), ends[1], "connection reset")
    return f"the stream of {agent.host.name} is reset"


def _cut(world: World, shortest_s: float, longest_s: float) -> str | None:
    agent = _some_agent(world)
    if agent is None:
        return None
    duration_s = world.rng.uniform(shortest_s, longest_s)
    agent.host.cut_until = world.clock.now + duration_s
    world.busy_until(agent.host.cut_until)
    if agent.stream is not None:
        agent.stream.fall_silent(agent.host.cut_until)
    return f"{agent.host.name} is cut off for {duration_s:.1f} s"


@_kind()
def short_partition(world: World) -> str | None:
    """Heals before anybody has noticed, or just after the agent has."""
    return _cut(world, 0.05, COORDINATOR_KEEPALIVE_S)


@_kind()
def long_partition(world: World) -> str | None:
    """Both ends notice; then it heals."""
    return _cut(world, AGENT_KEEPALIVE_S, 45.0)


# --- the coordinator -------------------------------------------------------------------------------------------


@_kind(weight=6)
def coordinator_replaced(world: World) -> str | None:
    """It dies, perhaps with a node, perhaps without a word; a fresh one takes over with the next term."""
    coordinator = world.coordinator
    if coordinator is None or not coordinator.alive or coordinator.core.state.name == "FINISHED":
        return None
    silently = world.rng.random() < 0.3
    coordinator.die("connection reset", silently)
    with_node = world.rng.random() < 0.5
    agent = _some_agent(world) if with_node else None
    if agent is not None:
        agent.vanish()
    delay_s = world.rng.choice((0.05, 0.5, 3.0, 10.0)) * world.rng.uniform(0.8, 1.2)
    world.clock.after(delay_s, world.new_coordinator)
    world.busy_until(world.clock.now + delay_s)
    where = f" with {agent.host.name}" if agent is not None else ""
    return f"the coordinator dies{where}; another takes over in {delay_s:.2f} s"


@_kind(weight=1)
def coordinator_gone(world: World) -> str | None:
    """It dies and nobody takes over."""
    coordinator = world.coordinator
    if coordinator is None or not coordinator.alive:
        return None
    coordinator.die("connection reset")
    return "the coordinator dies for good"


# --- signals ---------------------------------------------------------------------------------------------------


@_kind(weight=1)
def signal_at_one(world: World) -> str | None:
    """Somebody ends one agent."""
    agent = _some_agent(world)
    if agent is None:
        return None
    signum = world.rng.choice((15, 2))
    agent.step(Signalled(signum))
    return f"{agent.host.name} gets signal {signum}"


@_kind(weight=2)
def scancel(world: World) -> str | None:
    """Slurm signals every process of the step itself: agents and workers."""
    agents = world.living_agents()
    if not agents or not world.settings.agent.in_step:
        return None
    for agent in agents:
        after_s = world.rng.uniform(0.0, 1.0)
        world.clock.after(after_s, agent.step, Signalled(15, everybody=True))
        world.clock.after(after_s + world.rng.uniform(0.0, 0.1), agent.slurm_signals_workers, 15)
    world.busy_until(world.clock.now + 1.0)
    return "scancel: Slurm sends SIGTERM to every process"


@_kind(weight=2)
def signal_at_all(world: World) -> str | None:
    """Every agent is told to end, not quite at once, some twice."""
    agents = world.living_agents()
    if not agents:
        return None
    for agent in agents:
        for _ in range(world.rng.choice((1, 1, 2))):
            world.clock.after(world.rng.uniform(0.0, 1.0), agent.step, Signalled(15))
    world.busy_until(world.clock.now + 1.0)
    return "all nodes get SIGTERM"
