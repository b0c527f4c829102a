"""The timeline of a run from its event logs: the program that noticed each fault, when, and how fast training went on.

All times are wall clock, comparable because the demo's nodes are one machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the timeline."""

    wall: float
    who: str
    what: str


@dataclass(slots=True)
class Injected:
    """A fault that was injected for certain, and when training went on after it."""

    kind: str  # the FaultKind it must be recognised as
    what: str
    wall: float
    trains_again: float = 0.0  # every rank has done a step since


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one fault was survived; seconds after its injection."""

    fault: Injected
    kind: str  # as it was recognised
    noticed_by: str
    noticed_s: float
    decision: str  # the coordinator's sentence
    started_s: float  # all workers of the next cycle are started
    trains_s: float


@dataclass(slots=True)
class RunStory:
    """The event logs of one run directory, digested."""

    entries: list[Entry] = field(default_factory=list)
    noticed: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)  # (wall, who, RankFault as JSON)
    decisions: list[Entry] = field(default_factory=list)  # one per stopped cycle
    started: dict[int, float] = field(default_factory=dict)  # cycle -> when its last node started workers


def read_story(run_dir: Path) -> RunStory:
    """Digest `run_dir`/events/*.jsonl. A last line that is torn (its writer was killed) is left out."""
    story = RunStory()
    for path in sorted((run_dir / "events").glob("[ac]*.jsonl")):  # of agents and coordinators, not of elections
        coordinator = path.stem.startswith("coordinator")  # each term has a log of its own
        name = "coordinator"
        for line in _lines(path):
            if "core" in line:
                name = name if coordinator else f"agent {line['node']['host']} ({path.stem.removeprefix('agent_')})"
            elif coordinator:
                _coordinator_step(story, line)
            else:
                _agent_step(story, name, line)
    story.entries.sort(key=lambda e: e.wall)
    story.noticed.sort(key=lambda n: n[0])
    return story


def recoveries(story: RunStory, faults: list[Injected]) -> list[Recovery]:
    """Fault i ended cycle i. It counts as recognised by whoever first saw it for what it is, else by the first to see
    anything: peers of a lost rank may fail, and say so, before the loss itself is seen."""
    found: list[Recovery] = []
    for cycle, fault in enumerate(faults):
        since = [seen for seen in story.noticed if seen[0] >= fault.wall]
        decided = [d for d in story.decisions if d.wall >= fault.wall]
        if not since or not decided or cycle + 1 not in story.started:
            return found
        right = [seen for seen in since if seen[2]["kind"] == fault.kind and seen[0] <= decided[0].wall]
        wall, who, seen = (right or since)[0]
        started = story.started[cycle + 1] - fault.wall
        again = fault.trains_again - fault.wall
        found.append(Recovery(fault, seen["kind"], who, wall - fault.wall, decided[0].what, started, again))
    return found


def render(story: RunStory, faults: list[Injected], start: float) -> str:
    """The timeline as text, seconds since `start`; "!!" marks what was done to the job."""
    entries = [*story.entries, *(Entry(f.wall, "!!", f.what) for f in faults)]
    entries += [Entry(f.trains_again, "training", "every rank has done a step again") for f in faults if f.trains_again]
    width = max((len(e.who) for e in entries), default=0)
    ordered = sorted(entries, key=lambda e: e.wall)
    return "\n".join(f"{e.wall - start:8.3f} s  {e.who:{width}}  {e.what}" for e in ordered)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return


def _coordinator_step(story: RunStory, line: dict[str, Any]) -> None:
    event, wall = line["event"], line["wall"]
    said = [c["text"] for c in line["commands"] if c["type"] == "Say"]
    story.entries += [Entry(wall, "coordinator", text) for text in said]
    if line["state"] == "STOPPING" and said:
        story.decisions.append(Entry(wall, "coordinator", said[0]))
    if event["type"] == "Lost" and said:
        why = {"kind": "node-lost", "rank": -1}
        story.noticed.append((wall, "coordinator (broken stream)", why))
    for command in line["commands"]:
        if command["type"] == "JobOver":
            story.entries.append(Entry(wall, "coordinator", f"the job is done: {command['reason']}"))


def _agent_step(story: RunStory, name: str, line: dict[str, Any]) -> None:
    event, wall = line["event"], line["wall"]
    starting = [c["plan"] for c in line["commands"] if c["type"] == "StartWorkers"]
    stopping = any(c["type"] == "SignalWorkers" for c in line["commands"])
    fault = event.get("fault")
    if event["type"] == "Disconnected":
        story.noticed.append((wall, f"{name} (broken stream to the coordinator)", {"kind": "node-lost", "rank": -1}))
    if event["type"] == "HangSeen":
        story.noticed.append((wall, f"rank monitor of {name}", fault))
        story.entries.append(Entry(wall, name, f"rank {fault['rank']} hangs: {fault['message']}"))
    elif event["type"] == "WorkerExited" and fault and stopping | (line["state"] in ("IDLE", "STOPPING")):
        story.noticed.append((wall, name, fault))
    for plan in starting:
        story.started[plan["cycle"]] = max(wall, story.started.get(plan["cycle"], 0.0))
        story.entries.append(Entry(wall, name, f"starts its workers of cycle {plan['cycle']}"))
