"""A run as a story for people: when, who, what and why; equal lines of many agents become one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvrx_slurm.core.agent.events import Exit
from nvrx_slurm.core.coordinator.events import JobOver
from nvrx_slurm.core.machine import Machine, Say

_TOGETHER_S = 1.0  # equal lines of agents within this time are one line


@dataclass
class _Line:
    when: float
    who: str
    what: str
    times: int = 1


class Story:
    """Collects what cores say and what happens to them."""

    def __init__(self):
        self._lines: list[_Line] = []
        self._mark = 0
        self._open: dict[str, _Line] = {}  # by what the agents said, without its numbers

    def stepped(self, now, process, commands):
        """A core took a step."""
        core: Machine = process.core
        for command in commands:
            if isinstance(command, JobOver):
                self.tell(now, "coordinator", f"ends with code {command.code}: {command.reason}")
            elif isinstance(command, Exit):
                self._agent_says(now, core, f"exits with code {command.code}: {command.reason}")
            elif isinstance(command, Say) and hasattr(core, "node"):
                self._agent_says(now, core, command.text)
            elif isinstance(command, Say):
                self.tell(now, "coordinator", command.text)

    def tell(self, now, who, what):
        """One line."""
        self._lines.append(_Line(now, who, what))

    def mark(self):
        """Remember this place."""
        self._mark = len(self._lines)

    def tell_at_mark(self, now, who, what):
        """One line, at the remembered place."""
        self._lines.insert(self._mark, _Line(now, who, what))

    def _agent_says(self, now, core, what):
        key = re.sub(r"\d+", "#", what)
        line = self._open.get(key)
        if line is not None and now - line.when < _TOGETHER_S:
            line.times += 1
            return
        line = self._open[key] = _Line(now, core.node.host, what)
        self._lines.append(line)

    def text(self):
        """The whole story."""
        lines = []
        for line in self._lines:
            more = f"  (and {line.times - 1} more nodes alike)" if line.times > 1 else ""
            lines.append(f"{line.when:9.3f} s  {line.who:<12} {line.what}{more}")
        return "\n".join(lines)
