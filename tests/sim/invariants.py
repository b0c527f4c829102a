"""What must hold at every step of every run.

All checks look only at what changed, so that a run with 10,000 nodes can afford them.
"""

from collections import Counter

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import AgentState
from nvrx_slurm.core.attribution.recurrence import followed, nodes_of, place, suspects
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import (
    CheckNode,
    Finish,
    Lead,
    Plan,
    Refused,
    Stop,
)

from .reign import Reign

_SLACK_S = 1.0  # for simulated workers to die of a signal
_BY_SIGNAL = 128
_HARMLESS = {"duplicate", "warned", "slow-to-stop", "late-join", "asks-to-continue", "asks-to-shut-down"}
# With a node: the old cycle may be carried on before that is missed.
_TWO_RESTARTS = {"coordinator-dies", "coordinator-cut", "frozen", "short-partition", "long-partition"}


_WORKS = (AgentState.RUNNING, AgentState.STOPPING)


class Violation(AssertionError):
    """An invariant does not hold."""


def _shared(plan):
    """What all members see. Which nodes are dead becomes known in time."""
    return replace(plan, group_rank=-1, rank_offset=-1, dead=(), returned=())


def _split(commands, fresh):
    """What was done before a new plan, and from then on."""
    at = commands.index(fresh[0]) if fresh else len(commands)
    return commands[:at], commands[at:]


class Invariants:
    """Watches one world; raises Violation."""

    def __init__(self, world):
        self._world = world
        self._reigns = {}
        self._plans = {}  # (term, cycle) -> the part that all members share
        self._planners = {}
        self._places = {}  # (term, cycle, group rank) -> node_id, offset
        self._runners = set()  # (term, cycle, group rank) that was ever started
        self._last_started = {}  # node_id -> cycle
        self._begun = set()  # (term, cycle) of which a rank was started
        self._workers = {}  # by rank
        self._told = {}
        self._signalled = {}  # node_id -> the first signal that is to end it
        self._alone_since = {}
        self._led = {}  # node_id -> when it first had a coordinator
        self._won = {}  # term -> the one that acts
        self._newest = (0, -1)  # (term, cycle) of the latest plan
        self._unheard = 0  # cycles that a coordinator planned while it was cut off
        self._ends = []  # decided; one that no agent has heard is decided anew by the next coordinator
        self._decided = {}  # when, and on which host
        self._exited = None
        self.forgotten = False  # most nodes came back and began the job anew, beside a node that was cut off: no memory

    @property
    def end(self):
        return self._exited or (self._ends[-1] if self._ends else None)

    @property
    def terms(self):
        """Those in which a coordinator acted."""
        return set(self._won)

    def check(self, holds: bool, what: str, always: bool = False) -> None:
        """`always`: also of a job that was begun anew beside one that nobody can hear."""
        if not holds and (always or not self.forgotten):
            s = self._world.settings
            raise Violation(f"seed {s.seed}, {s.nodes} nodes, at {self._world.clock.now:.4f} s: {what}")

    # --- the coordinator ---------------------------------------------------------------------------------

    def coordinator_stepped(self, coordinator, event, commands):
        """Called after each step of a coordinator, before its commands are carried out."""
        reign = self._reigns.setdefault(coordinator, Reign())
        reign.carries_on = reign.carries_on and reign.fresh
        reign.fresh = coordinator.core.job.fresh
        reign.hear(event)
        plans = [c for c in commands if isinstance(c, ev.SendTo) and isinstance(c.message, Plan)]
        self._mind_a_new_job(coordinator, reign, plans)
        if any(isinstance(c, ev.Won) for c in commands):
            self._check_won(coordinator, reign)
        fresh = [c for c in plans if self._planners.get((c.message.term, c.message.cycle)) is not coordinator]
        before, after = _split(commands, fresh)
        reign.tell(before)
        if fresh:
            self._forget_what_is_lost(fresh[0].message, coordinator)
            self._check_not_over(reign)
            joining = {event.message.node.node_id} if isinstance(event, ev.Joined) else set()
            # After an election all voters register in one step, and what they have said meanwhile comes last.
            joining |= {c.node_id for c in after if isinstance(c, ev.SendTo) and isinstance(c.message, Lead)}
            joining |= {c.node_id for c in after if isinstance(c, ev.Drop)}  # one of them is refused, e.g. as excluded
            refused = {c.node_id for c in before if isinstance(c, ev.Drop)}
            # A cycle that is carried on may be over in this step: the others hear the end.
            joining |= {c.node_id for c in commands if isinstance(c, ev.SendTo) and isinstance(c.message, Finish)}
            out = coordinator.host.out_after(self._world.clock.now)  # perhaps no other node ever knows of this plan
            self._unheard += out and fresh[0].message.cycle > max((cycle for _, cycle in self._plans), default=-1)
            self._check_new_plan(reign, fresh, joining, refused)
            self._planners[self._newest] = coordinator
        reign.tell(after)
        for command in plans:
            self._check_one_plan(reign, command.node_id, command.message)
        ends = [c for c in commands if isinstance(c, ev.SendTo) and isinstance(c.message, Finish)]
        for command in ends:
            self._check_end(coordinator, command.message)
        for command in commands:
            if isinstance(command, ev.Drop):
                reign.forget(command.node_id)
            elif isinstance(command, ev.SendTo) and isinstance(command.message, (Stop, CheckNode)):
                reign.carries_on = reign.carries_on and command.message.cycle < reign.known_cycle  # a straggler
        if ends and not isinstance(event, ev.Joined):
            told = {c.node_id for c in ends}
            self.check(told == reign.connected.keys(), "the end is not told to all who are connected")

    def _check_won(self, coordinator, reign):
        """Nodes that have come back and know nothing may elect one of their own: it is judged by its first plan."""
        agents = self._world.agents
        came_back = len(agents) > len({agent.host.infra_rank for agent in agents})
        reign.anew = came_back and reign.known_cycle < 0
        if reign.anew:
            return
        term = coordinator.core.job.term
        other = self._won.setdefault(term, coordinator)
        self.check(other is coordinator or not other.alive, f"two coordinators act in term {term}")

    def _check_not_over(self, reign):
        """Only nodes that were out of reach when the job ended go on, with new ones: decision 017 says so. Those that
        have come back and know nothing of the job cannot know its end."""
        if self._exited is None or reign.anew:
            return
        ended, _ = self._decided[self._exited.code, self._exited.reason]
        old = {node_id for node_id in reign.connected if self._led.get(node_id, ended) < ended}
        out = any(agent.host.was_out for agent in self._world.living_agents() if agent.core.node.node_id in old)
        self.check(out or not old, f"a cycle is planned after agents have left with {self._exited}")

    def _mind_a_new_job(self, coordinator, reign, plans):
        """Nodes that have come back know nothing of the job. Where they are most of the nodes, or those that know it
        are out of reach or stopped, they begin it anew: decision 017 says so, and there is nothing more to judge."""
        first = plans[0].message if plans else None
        fresh = reign.newest_plan < 0 and reign.known_cycle < 0
        if isinstance(first, Plan) and first.cycle == 0 and self._plans and fresh:
            now = self._world.clock.now
            living = self._world.living_agents()
            agents = [agent for agent in living if agent.core.node.node_id not in self._told]
            knowing = [agent for agent in agents if agent.core.plan is not None]
            out = all(agent.host.out_after(now) for agent in knowing)
            back = {agent.host.name for agent in living if agent.core.plan is None}
            back &= {agent.host.name for agent in self._world.agents if not agent.alive}
            most_are_back = 2 * len(back) > self._world.settings.nodes
            # a node that was told its end still ends its ranks
            told = [agent for agent in living if agent not in agents and agent.core.plan is not None]
            leaving = any(most_are_back or agent.host.out_after(now) for agent in told)
            self.forgotten = bool(knowing) and (out or 2 * len(knowing) < self._world.settings.nodes)
            self.forgotten |= leaving or any(agent.host.frozen_until > now for agent in agents)
            if not knowing:
                self._forget_what_is_lost(first, coordinator)

    def _forget_what_is_lost(self, plan, planner):
        """Plans that are known to no living agent or coordinator are lost: new ones need not be later than these."""
        if (plan.term, plan.cycle) > self._newest:
            return
        agents = self._world.living_agents()
        leaders = [one for one in self._world.coordinators if one.leads and one is not planner]
        if self._ends:  # the others have left: what a node knows that is out of reach, nobody can hear
            agents = [one for one in agents if not one.host.out_after(self._world.clock.now)]
            leaders = [one for one in leaders if not one.host.out_after(self._world.clock.now)]
        # One that was told the end keeps it to itself.
        living = [agent.core.plan for agent in agents if agent.core.node.node_id not in self._told]
        living += [leader.core.job.assignment.shared for leader in leaders]
        self._newest = known = max(((p.term, p.cycle) for p in living if p is not None), default=(0, -1))
        memories = (self._plans, self._places, self._world.training.runs)
        for memory in memories:
            for key in [key for key in memory if key[:2] > known]:
                del memory[key]
        self._runners = {key for key in self._runners if key[:2] <= known}
        self._begun = {key for key in self._begun if key <= known}

    def _check_one_plan(self, reign, node_id, plan):
        """One content per (term, cycle), one holder per group rank, and nothing for the lost."""
        shared = _shared(plan)
        self.check(shared == self._plans[plan.term, plan.cycle], f"two plans for term {plan.term} cycle {plan.cycle}")
        self.check(node_id in reign.connected, f"a plan for {node_id}, which is not connected")
        if plan.active:
            held = self._places.get((plan.term, plan.cycle, plan.group_rank))
            self.check(held == (node_id, plan.rank_offset), f"group rank {plan.group_rank} belongs to {held}")

    def _check_new_plan(self, reign, fan_out, joining, refused):
        """The first time that a (term, cycle) is seen: all of it is in these commands."""
        plan = fan_out[0].message
        assert isinstance(plan, Plan)
        for node_id in refused:
            reign.forget(node_id)
        self._plans[plan.term, plan.cycle] = _shared(plan)
        self.check(plan.cycle > reign.newest_plan, f"cycle {plan.cycle} is planned after cycle {reign.newest_plan}")
        later = (plan.term, plan.cycle) > self._newest
        if reign.anew and not later:
            later = plan.cycle + (plan.cycle == reign.known_cycle) > self._newest[1]
        self.check(later, f"{plan.term, plan.cycle} is planned after {self._newest}")
        self._newest = plan.term, plan.cycle
        reign.newest_plan = plan.cycle
        cycles, budget = len({cycle for _, cycle in self._plans}) - self._unheard, plan.max_restarts
        self.check(cycles <= budget + 1, f"{cycles} cycles are planned, with {budget} restarts allowed")
        self.check(plan.history.restarts_used <= budget, "more restarts are used than allowed")
        active = {c.message.group_rank: c for c in fan_out if isinstance(c.message, Plan) and c.message.active}
        settings = self._world.settings
        if settings.min_healthy and plan.cycle <= reign.known_cycle:  # carried on, perhaps without some of its nodes
            self.check(len(active) >= settings.min_nodes, "a cycle is carried on with too few nodes")
            self._carried_on(reign, plan, active)
            return
        right = range(settings.min_nodes, settings.nodes + 1) if settings.min_healthy else (settings.min_nodes,)
        self.check(plan.active_nodes == len(active) and len(active) in right, f"{len(active)} active nodes")
        self.check(sorted(active) == list(range(len(active))), "not every group rank is assigned")
        offset = 0
        for group_rank, command in sorted(active.items()):
            assert isinstance(command.message, Plan)
            self.check(command.message.rank_offset == offset, f"ranks of group rank {group_rank} start elsewhere")
            self._places[plan.term, plan.cycle, group_rank] = (command.node_id, offset)
            offset += reign.connected[command.node_id].nproc
        self.check(plan.world_size == offset, "the world size is not the number of ranks")
        receivers = {c.node_id for c in fan_out}
        left_out = [n for n in reign.connected if n not in receivers | joining and reign.can_run(n)]
        self.check(not left_out, f"{left_out} could run, but are not in the plan")
        self._check_choice(reign, plan, {g: c.node_id for g, c in active.items()}, receivers - joining)

    def _carried_on(self, reign, plan, active):
        """min-healthy: the places of those who are here are as they were."""
        for group_rank, command in active.items():
            assert isinstance(command.message, Plan)
            place = (command.node_id, command.message.rank_offset)
            before = [key for key in self._places if key[0] <= plan.term and key[1:] == (plan.cycle, group_rank)]
            # A cycle that nobody has survived may have been planned once more, or is known to nobody.
            held = self._places[max(before)] if before else place
            self._places[plan.term, plan.cycle, group_rank] = place
            self.check(held == place, f"group rank {group_rank} of cycle {plan.cycle} was {held}")
            reign.active[group_rank] = command.node_id
            self.check(
                reign.busy.get(command.node_id) == plan.cycle, f"{command.node_id} does not run what it carries on"
            )

    def _check_choice(self, reign, plan, active, receivers):
        """Who may be chosen, who must be, and in which order."""
        if plan.cycle <= reign.known_cycle:  # carried on from an older term
            runs = {reign.busy.get(node_id) for node_id in active.values()}
            self.check(runs == {plan.cycle}, f"cycle {plan.cycle} is carried on, but its nodes run {runs}")
        else:
            for node_id in active.values():
                self.check(reign.can_run(node_id), f"{node_id} is in a plan, but it is lost or busy")
            if not self._world.settings.segment:  # tests/core/test_gathering.py has any situation with segments
                self._check_order(reign, active, receivers, plan.history.restarts)
        reign.before, reign.active = reign.active, active
        for node_id in active.values():
            reign.busy[node_id] = plan.cycle

    def _check_order(self, reign, active, receivers, past):
        """Without segments: survivors stay where they are, and spares come in infra order. A node whose failure has
        come back gives way to any other; where that has moved with the rank, the node may have its place back."""
        chosen, weak = set(active.values()), suspects(past)
        last = {n for n, node in reign.connected.items() if place(node) in weak}  # also one that joins in this step
        moved = nodes_of(past[-1]).keys() | nodes_of(past[-2]).keys() if followed(past) else set()
        came = {node for g, node in reign.active.items() if followed(past) and reign.before.get(g) != node}
        self.check(not last & chosen or receivers <= last | chosen, f"{last} are active, and others are spares")
        for group_rank, node_id in reign.active.items():
            free = not reign.can_run(node_id) or group_rank >= len(active)  # min-healthy may shrink
            free = free or node_id in last | came or place(reign.connected[node_id]) in moved
            stays = free or active[group_rank] == node_id
            self.check(stays, f"{node_id} could go on as group rank {group_rank}, but is not let")
        before = set(reign.active.values())
        promoted = [reign.connected[n].infra_rank for _, n in sorted(active.items()) if n not in before and not moved]
        self.check(promoted == sorted(promoted), "spares are not promoted in infra order")
        spares = [reign.connected[n].infra_rank for n in receivers - chosen - last]
        passed_over = bool(promoted and spares) and min(spares) < promoted[-1]
        self.check(not passed_over, f"of the spares {sorted(spares)}, {promoted} were promoted")

    def _check_end(self, coordinator, end):
        """All hear one end, and it is the right one."""
        if end in self._ends:
            return
        self._ends.append(end)
        self._decided.setdefault((end.code, end.reason), (self._world.clock.now, coordinator.host))
        world, core = self._world, coordinator.core
        if end.code == ExitCode.OK:
            self.check(self._is_success(), "the job ends with 0, but not all ranks have succeeded")
        elif end.code == ExitCode.FAILED:
            self.check("restart" in end.reason, f"no word about restarts: {end.reason}")
            used = core.budget.history.restarts_used
            spent = used == core.settings.max_restarts or "for exit faults" in end.reason
            self.check(spent, "the job ends with restarts left")
        elif end.code == ExitCode.NO_RESTART:
            asked = world.fired["asks-to-shut-down"] > 0 and "asked to shut down" in end.reason
            stuck = core.settings.tracks_progress and "no progress" in end.reason
            self.check(asked or stuck, f"nobody asked for this end: {end}")
        elif "of the allocation are left" in end.reason:
            left_s = world.settings.time_limit_s - world.clock.now
            limited = world.settings.time_limit_s > 0.0 and end.code == _BY_SIGNAL + 15
            self.check(limited and left_s <= 6.0, f"{left_s:.1f} s are left: {end}")
        elif end.code == ExitCode.TOO_FEW_NODES and "exclusion" in end.reason:
            left = world.settings.nodes - len(core.budget.history.excluded)
            self.check(left < core.settings.min_nodes, f"{left} nodes are enough: {end}")
        elif end.code == ExitCode.TOO_FEW_NODES and "no majority" in end.reason:
            self.check(not core.roster.quorum.elected, f"a coordinator with a quorum says {end.reason}")
        elif end.code == ExitCode.TOO_FEW_NODES:
            self.check("join timeout" in end.reason, f"no word about the join timeout: {end.reason}")
            able = Counter(a.core.node.domain for a in world.living_agents() if self._is_able(a, coordinator))
            segment = core.settings.segment or 1
            usable = sum(count // segment for count in able.values()) * segment
            self.check(usable < core.settings.min_nodes, f"too few nodes, but {usable} are able: {end.reason}")
        else:
            self.check(end.code - _BY_SIGNAL in self._signalled.values(), f"nobody asked for this end: {end}")
        harm = sum(n * (2 if kind in _TWO_RESTARTS else 1) for kind, n in world.fired.items() if kind not in _HARMLESS)
        used = core.budget.history.restarts_used
        self.check(used <= harm, f"{used} restarts for {harm} faults")

    def _is_success(self):
        """any-failed: all ranks of a cycle have ended with 0; min-healthy: those of enough whole nodes."""
        world = self._world
        if not world.settings.min_healthy:
            return world.training.succeeded
        done = sum(agent.core.state is AgentState.SUCCEEDED or agent.done for agent in world.agents)
        return done >= world.settings.min_nodes

    def _is_able(self, agent, coordinator):
        here = agent.connected and coordinator.streams.get(agent.core.node.node_id) is agent.stream
        quiet = max(agent.host.out_until, agent.host.slow_until, self._world.split.until) <= self._world.clock.now
        fit = not agent.host.sick and not agent.unprepared
        return here and quiet and fit and agent.core.state is not AgentState.LEAVING

    # --- agents --------------------------------------------------------------------------------------------

    def agent_stepped(self, agent, event, commands):
        """Called after each step of an agent, before its commands are carried out."""
        node_id, now = agent.core.node.node_id, self._world.clock.now
        if isinstance(event, Lead):
            self._alone_since.pop(node_id, None)
            self._led.setdefault(node_id, now)
        elif isinstance(event, ag.Disconnected):
            if node_id in self._led:
                self._alone_since.setdefault(node_id, now)
            s = agent.core.settings
            longest_s = s.orphan_grace_s + max(s.stop_timeout_s, s.term_timeout_s) + s.kill_timeout_s + _SLACK_S
            self._world.clock.after(longest_s, self._check_no_orphans, agent, now)
        elif isinstance(event, ag.Signalled):
            self._signalled.setdefault(node_id, event.signum)
        elif isinstance(event, ag.Warned) and agent.core.state in (AgentState.LEAVING, AgentState.GONE):
            self._signalled.setdefault(node_id, 15)  # a second warning is a signal to end
        elif isinstance(event, Finish) or (isinstance(event, Refused) and node_id not in self._signalled):
            self._told.setdefault(node_id, event)
        elif isinstance(event, (ag.Sick, ag.Prepared)):
            agent.unprepared = agent.unprepared and isinstance(event, ag.Sick)
            agent.told_sick = agent.told_sick or isinstance(event, ag.Sick) or bool(event.unfit)
        for command in commands:
            if isinstance(command, ag.Prepare):
                agent.unprepared = True
            elif isinstance(command, ag.StartWorkers):
                self.check(not agent.told_sick, f"{node_id} starts workers, though it is sick")
                self.check(not agent.unprepared, f"{node_id} starts workers before it is prepared")
                agent.unprepared = True
                self._check_start(agent, node_id, command.plan)
            elif isinstance(command, ag.SignalWorkers) and command.signum == 15:
                twice = any(w.terms for w in agent.living()) and not agent.host.was_out  # Slurm may have signalled it
                self.check(not twice, f"a worker on {node_id} gets SIGTERM twice")

    def _check_start(self, agent, node_id, plan):
        """Nobody else runs this group rank of this cycle, and the old workers are gone."""
        key = (plan.term, plan.cycle, plan.group_rank)
        self.check(key not in self._runners, f"{node_id} starts {key}, which somebody has started")
        self._runners.add(key)
        self.check(not agent.living(), f"{node_id} starts workers while old ones live", always=True)
        ranks = range(plan.rank_offset, plan.rank_offset + agent.core.node.nproc)
        if self._world.clock.now < agent.lease_until:  # otherwise it starts none
            for rank in ranks:
                alive = [w for w in self._workers.get(rank, ()) if w.alive and not w.stuck]
                where = [w.agent.host.name for w in alive]
                self.check(not alive, f"{node_id} starts rank {rank}, which runs on {where}", always=True)
                self._workers[rank] = alive
            if (plan.term, plan.cycle) not in self._begun:
                self._begun.add((plan.term, plan.cycle))
                self._check_older_cycles(plan)
        self.check(self._last_started.get(node_id, -1) < plan.cycle, f"{node_id} goes back to cycle {plan.cycle}")
        self._last_started[node_id] = plan.cycle

    def _check_older_cycles(self, plan):
        """Before the first rank of a cycle starts, all of the older ones are gone."""
        for other in self._world.living_agents():
            if other.core.plan is not None and other.core.plan.cycle < plan.cycle and other.core.state in _WORKS:
                old = [w.rank for w in other.living() if not w.stuck]
                self.check(
                    not old, f"cycle {plan.cycle} begins, but ranks {old} of an older one run on {other.host.name}"
                )

    def started(self, worker):
        self._workers.setdefault(worker.rank, []).append(worker)

    def _check_no_orphans(self, agent, since):
        alone = agent.alive and self._alone_since.get(agent.core.node.node_id) == since
        orphans = [w.rank for w in agent.living() if not w.stuck] if alone else []
        self.check(
            not orphans, f"{agent.host.name} is alone since {since:.2f} s, but runs ranks {orphans}", always=True
        )

    def left(self, agent):
        """An agent has exited: with the code that it was told, and for a good reason otherwise."""
        if agent.exit is None:
            return  # it was killed
        node_id, code = agent.core.node.node_id, agent.exit.code
        if node_id in self._told:
            told = self._told[node_id]
            self.check(code == told.code, f"{node_id} exits with {code}, but was told {told}")
            alone = isinstance(told, Finish) and "no majority" in told.reason  # it found too few nodes to be told more
            if isinstance(told, Finish) and not alone:
                self._compare_ends(agent, told)
        elif node_id in self._signalled:
            self.check(code == _BY_SIGNAL + self._signalled[node_id], f"{node_id} exits with {code} after a signal")
        elif code == ExitCode.NODE_REFUSED:
            stuck = any(worker.stuck for worker in agent.workers)
            self.check(stuck, f"{node_id} exits with {code}: {agent.exit.reason}")
        else:
            s = agent.core.settings
            since = self._alone_since.get(node_id, agent.core.started)
            alone_s = self._world.clock.now - since + 1e-6
            self.check(code == ExitCode.COORDINATOR_LOST, f"{node_id} exits with {code} without being told")
            self.check(alone_s >= min(s.reconnect_timeout_s, s.join_timeout_s), f"{node_id} gave up early")

    def _compare_ends(self, agent, told):
        """All agents exit with one code, but one that was out of reach when an end was decided cannot know it. An
        agent that came later may have met only that one. A coordinator that was just cut off decides for its side."""
        first = self._exited or told
        ends = [self._decided[end.code, end.reason] for end in (first, told)]
        excused = any(host.out_after(at) for at, decider in ends for host in (agent.host, decider))
        excused = excused or self._led.get(agent.core.node.node_id, 0.0) > ends[0][0]
        if not excused:
            self._exited = first
            self.check(first.code == told.code, f"two ends: {first} and {told}")

    def at_the_end(self):
        for agent in self._world.agents:
            orphans = [worker.rank for worker in agent.living() if not worker.stuck]
            self.check(not orphans, f"ranks {orphans} on {agent.host.name} have outlived the job")
