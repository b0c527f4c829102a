"""Everything that can go wrong. Each fault is given its victim, does its harm and returns a sentence about it.

`strike(world)` lets one happen, of a kind drawn with the world's own seed. None = it cannot happen just now.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_slurm.core.agent.agent import AgentState
from nvrx_slurm.core.agent.events import RankAsked, Sick, Signalled, Warned
from nvrx_slurm.types import FaultKind, RankFault, RanksFailed, WorkloadAction

from .network import AGENT_KEEPALIVE_S, COORDINATOR_KEEPALIVE_S

if TYPE_CHECKING:
    from .world import World

Fault = Callable[["World"], "str | None"]
KINDS: dict = {}  # by name, with how often it comes relative to the others
_TRIES = 5


def strike(world):
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


# --- victims --------------------------------------------------------------------------------------------------


def _world(world):
    return world


def _agent(world):
    agents = world.living_agents()
    return world.rng.choice(agents) if agents else None


def _worker(world):
    agents = [agent for agent in world.living_agents() if agent.core.state is AgentState.RUNNING and agent.living()]
    return world.rng.choice(world.rng.choice(agents).living()) if agents else None


def _of(victim, weight=4):
    """Register a kind of fault, named after its function, with the function that picks its victim."""

    def register(harm):
        def fault(world):
            hit = victim(world)
            return None if hit is None else harm(world, hit)

        KINDS[harm.__name__.replace("_", "-")] = (fault, weight)

    return register


# --- workers --------------------------------------------------------------------------------------------------


@_of(_worker)
def worker_killed(world, worker):
    """Out of memory, say."""
    world.training.die_with(worker)
    worker.die(-9, "SIGKILL")
    return f"{worker.name} is killed"


@_of(_worker)
def worker_exits(world, worker):
    """An exception in user code."""
    world.training.die_with(worker)
    worker.die(world.rng.choice((1, 3, 77)), "ValueError: loss is NaN")
    return f"{worker.name} exits with an error"


@_of(_worker)
def worker_hangs(world, worker):
    """Its monitor notices and kills it; the exit may be seen before the report of the hang."""
    world.training.stall(worker.run)
    world.clock.after(world.rng.uniform(0.0, 0.05), worker.seem_hung)
    worker.hung = True
    hold_s = 2 * world.settings.agent.hang_collect_s
    world.clock.after(hold_s + world.rng.uniform(0.02, 0.1), worker.die, -9, "no heartbeat for 30 s", FaultKind.HANG)
    return f"{worker.name} hangs"


@_of(_world)
def false_alarm(world, _):
    """A rank that seems hung at its very end finishes before its monitor gets to kill it."""
    if world.training.false_alarm:
        return None
    world.training.false_alarm = True
    return "a monitor will take a rank that is about to finish for hung"


@_of(_worker)
def worker_stuck(world, worker):
    """Uninterruptible sleep: not even SIGKILL ends it."""
    world.training.stall(worker.run)
    worker.stuck = True
    worker.seem_hung()
    return f"{worker.name} hangs in the kernel (D state)"


@_of(_agent)
def slow_to_stop(world, agent):
    agent.stubborn = True
    for worker in agent.living():
        worker.stubborn = True
    return f"workers on {agent.host.name} ignore SIGTERM from now on"


@_of(_agent)
def warned(world, agent):
    """Slurm's early warning; harmless."""
    agent.step(Warned(10))
    return f"{agent.host.name} gets SIGUSR1"


# --- requests of ranks ----------------------------------------------------------------------------------------


def _ask(worker, action):
    worker.agent.step(RankAsked(worker.local_rank, action, "so it wants"))
    return f"{worker.name} asks: {action.name}"


@_of(_worker, weight=2)
def asks_to_continue(world, worker):
    return _ask(worker, WorkloadAction.Continue)


@_of(_worker)
def asks_to_exclude(world, worker):
    """A rank takes its own node for sick; its agent may come back all the same."""
    host = worker.agent.host
    said = _ask(worker, WorkloadAction.ExcludeThisNode)
    return f"{said}; {host.name} comes back in {world.start_later(host, 0.5, 40.0):.1f} s"


@_of(_worker, weight=1)
def asks_to_shut_down(world, worker):
    """A rank knows that going on makes no sense."""
    return _ask(worker, WorkloadAction.ShutdownWorkload)


# --- nodes ----------------------------------------------------------------------------------------------------


@_of(_agent)
def agent_crashes(world, agent):
    agent.crash(in_flight=world.rng.random() < 0.5)
    return f"the agent on {agent.host.name} is killed"


@_of(_agent)
def host_vanishes(world, agent):
    """Power failure: only silence."""
    agent.vanish()
    return f"{agent.host.name} loses power"


@_of(_agent)
def node_sick(world, agent):
    """A health check fails, while the node runs workers or waits, or not before it is to be used again."""
    agent.host.sick = "GPU 3 is lost"
    at_once = world.rng.random() < 0.5
    if at_once:
        agent.step(Sick(agent.host.sick))
    return f"{agent.host.name} is sick, which is seen {'at once' if at_once else 'when it is checked'}"


@_of(_agent)
def comes_back(world, agent):
    """A node dies and is back as a new life, possibly before it was missed."""
    if world.rng.random() < 0.5:
        agent.vanish()
    else:
        agent.crash(in_flight=False)
    return f"{agent.host.name} reboots and will be back in {world.start_later(agent.host, 0.01, 8.0):.1f} s"


@_of(_world)
def late_join(world, _):
    """A host that has no agent yet, or none any more, gets one."""
    idle = [host for host in world.hosts if host.agent is None or not host.agent.alive]
    if not idle or world.over:
        return None
    host = world.rng.choice(idle)
    world.start_agent(host)
    return f"a new agent starts on {host.name}"


@_of(_agent, weight=2)
def agent_broken(world, agent):
    """Its next message makes no sense: the coordinator must drop it and go on."""
    if agent.stream is None or agent.core.plan is None or not agent.core.plan.active:
        return None
    fault = RankFault(FaultKind.EXIT, agent.host.name, agent.core.node.infra_rank)
    agent.stream.up(RanksFailed(agent.core.term + 9, agent.core.plan.cycle + 9, (fault,)))
    return f"the agent on {agent.host.name} reports a failure of a cycle that never was"


# --- the network ----------------------------------------------------------------------------------------------


@_of(_agent)
def slow_network(world, agent):
    agent.host.slow_until = world.clock.now + world.rng.uniform(1.0, 20.0)
    agent.host.out_last = max(agent.host.out_last, agent.host.slow_until)
    world.busy_until(agent.host.slow_until)
    return f"the network of {agent.host.name} crawls for {agent.host.slow_until - world.clock.now:.1f} s"


@_of(_agent)
def stream_resets(world, agent):
    """A connection breaks, what is under way is lost, and both ends live. That of one process with itself cannot."""
    if agent.stream is None or agent.stream.local:
        return None
    ends = [agent.stream.break_at_agent, agent.stream.break_at_coordinator]
    world.rng.shuffle(ends)
    ends[0]("connection reset")
    world.clock.after(world.rng.choice((0.0, 0.001, 0.1)), ends[1], "connection reset")
    return f"the stream of {agent.host.name} is reset"


def _cut(world, agent, shortest_s, longest_s):
    duration_s = world.rng.uniform(shortest_s, longest_s)
    agent.host.cut_until = world.clock.now + duration_s
    world.busy_until(agent.host.cut_until)
    _silence(agent, agent.host.cut_until)
    return f"{agent.host.name} is cut off for {duration_s:.1f} s"


def _silence(agent, heals):
    """No beat gets through on the streams that end on this node."""
    agent.host.out_last = max(agent.host.out_last, heals)
    accepted = agent.coordinator.accepted if agent.coordinator is not None else []
    for stream in (agent.stream, *accepted):
        if stream is not None:  # where one end has closed it, the word of that may be under way
            stream.fall_silent(heals)


@_of(_agent)
def short_partition(world, agent):
    """Heals before any end has noticed, or just after the agent has."""
    return _cut(world, agent, 0.05, COORDINATOR_KEEPALIVE_S)


@_of(_agent)
def long_partition(world, agent):
    """Both ends notice; then it heals."""
    return _cut(world, agent, AGENT_KEEPALIVE_S, 45.0)


@_of(_agent)
def one_way_cut(world, agent):
    """What the node sends, or what is sent to it, gets lost. No connection survives that for long."""
    duration_s = world.rng.uniform(0.05, 45.0)
    until, mute = world.clock.now + duration_s, world.rng.random() < 0.5
    if mute:
        agent.host.mute_until = until
    else:
        agent.host.deaf_until = until
    world.busy_until(until)
    _silence(agent, until)
    return f"{agent.host.name} is not {'heard' if mute else 'reached'} for {duration_s:.1f} s"


@_of(_world, weight=3)
def split(world, _):
    """Two parts of the cluster, often halves, hear nothing of each other."""
    if len(world.hosts) < 2 or world.split.until > world.clock.now:
        return None
    size = len(world.hosts) // 2 if world.rng.random() < 0.5 else world.rng.randrange(1, len(world.hosts))
    side = frozenset(world.rng.sample(range(len(world.hosts)), size))
    duration_s = world.rng.uniform(1.0, 45.0)
    world.split.side, world.split.until = side, world.clock.now + duration_s
    world.busy_until(world.split.until)
    for host in world.hosts:
        host.out_last = max(host.out_last, world.split.until)
    for stream in [stream for agent in world.living_agents() if (stream := agent.stream) is not None]:
        if (stream.agent.host.infra_rank in side) != (stream.coordinator.host.infra_rank in side):
            stream.fall_silent(world.split.until)
    return f"{len(side)} of {len(world.hosts)} hosts are apart from the others for {duration_s:.1f} s"


# --- the coordinator ------------------------------------------------------------------------------------------


def _coordinator(world):
    coordinator = world.coordinator
    return coordinator.agent if coordinator is not None else None


@_of(_coordinator, weight=6)
def coordinator_dies(world, agent):
    """Its program is killed, or its host loses power; it may come back."""
    if world.rng.random() < 0.5:
        agent.vanish()
    else:
        agent.crash(in_flight=world.rng.random() < 0.5)
    back = f"; it comes back in {world.start_later(agent.host, 0.01, 20.0):.1f} s" if world.rng.random() < 0.5 else ""
    return f"the coordinator's node {agent.host.name} dies{back}"


@_of(_coordinator, weight=4)
def coordinator_cut(world, agent):
    return _cut(world, agent, 0.05, 45.0)


@_of(_coordinator, weight=3)
def coordinator_frozen(world, agent):
    """Its program is stopped, or blocks in a dead file system."""
    return _freeze(world, agent)


@_of(_agent)
def frozen(world, agent):
    return _freeze(world, agent)


def _freeze(world, agent):
    duration_s = world.rng.choice((0.5, 4.5, 8.0, 30.0)) * world.rng.uniform(0.8, 1.2)
    agent.host.frozen_until = max(agent.host.frozen_until, world.clock.now + duration_s)
    world.busy_until(agent.host.frozen_until)
    _silence(agent, agent.host.frozen_until)
    return f"the agent on {agent.host.name} is stopped for {duration_s:.1f} s"


# --- signals --------------------------------------------------------------------------------------------------


@_of(_agent, weight=1)
def signal_at_one(world, agent):
    """A person ends one agent."""
    signum = world.rng.choice((15, 2))
    agent.step(Signalled(signum))
    return f"{agent.host.name} gets signal {signum}"


@_of(_world, weight=2)
def scancel(world, _):
    """Slurm signals every process of the step itself: agents and workers."""
    if not world.settings.agent.in_step:
        return None
    for agent in world.living_agents():
        after_s = world.rng.uniform(0.0, 1.0)
        world.clock.after(after_s, agent.step, Signalled(15, everybody=True))
        world.clock.after(after_s + world.rng.uniform(0.0, 0.1), agent.slurm_signals_workers, 15)
    world.busy_until(world.clock.now + 1.0)
    return "scancel: Slurm sends SIGTERM to every process" if world.living_agents() else None


@_of(_world, weight=2)
def signal_at_all(world, _):
    """Every agent is told to end, not quite at once, some twice."""
    for agent in world.living_agents():
        for _time in range(world.rng.choice((1, 1, 2))):
            world.clock.after(world.rng.uniform(0.0, 1.0), agent.step, Signalled(15))
    world.busy_until(world.clock.now + 1.0)
    return "all nodes get SIGTERM" if world.living_agents() else None
