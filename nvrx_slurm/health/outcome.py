"""The findings of a run as a table for people, one JSON line for machines, and an exit code for programs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from nvrx_slurm.health.check import CheckFinding, Verdict

EXIT_PASS, EXIT_FAIL, EXIT_USAGE, EXIT_UNKNOWN = 0, 1, 2, 3
# begins an answer of `check_server`: its stderr, which C libraries write to, may be the same stream
ANSWER = "\x1e"
GRAVE = ("drain", "fail")  # actions; the other one is "warn"
_ORDER = ("FAIL", "WARN", "UNKNOWN", "pass", "not applicable")  # words of rows


class Report(NamedTuple):
    """`seconds`: of the whole run."""

    node: str
    when: str
    findings: list[CheckFinding]
    notes: list[str]
    seconds: float

    @property
    def grave(self) -> list[CheckFinding]:
        """Findings with a grave action: failures, and unknowns that the site treats as such. Warnings are not here."""
        return [finding for finding in self.findings if finding.action in GRAVE]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the node as a whole."""
        if self.grave:
            return Verdict.FAIL
        unknown = any(finding.verdict is Verdict.UNKNOWN for finding in self.findings)
        return Verdict.UNKNOWN if unknown else Verdict.PASS

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 unknown; 2 (usage) is never a report's."""
        verdict = self.verdict
        if verdict is Verdict.FAIL:
            return EXIT_FAIL
        return EXIT_UNKNOWN if verdict is Verdict.UNKNOWN else EXIT_PASS

    def as_json(self, **more: object) -> str:
        """One line with further members `more`; `from_json` reads it."""
        plain = self._asdict()
        plain |= {"verdict": self.verdict.value, **more}
        plain["findings"] = [finding._asdict() for finding in self.findings]
        return json.dumps(plain)

    def table(self, everything: bool = False) -> str:
        """Failures first; checks that do not apply to this node only if `everything`."""
        shown = [f for f in self.findings if everything or f.verdict is not Verdict.NOT_APPLICABLE]
        shown.sort(key=lambda finding: _ORDER.index(_word(finding)))
        width = max((len(finding.check) for finding in shown), default=0)
        words = [_word(finding) for finding in self.findings]
        counts = []
        for word in _ORDER:
            if count := words.count(word):
                counts.append(f"{count} {word.lower()}")
        told = ", ".join(counts) or "no checks"
        more = " (--all shows what does not apply)" if len(shown) < len(words) else ""
        last = f"{self.node}: {self.verdict.value} in {self.seconds:.2f} s: {told}{more}"
        rows = [_row(finding, width) for finding in shown]
        return "\n".join([*rows, last])


def from_json(line: str) -> Report:
    """The report in a line of `as_json`, whose values have its types. Raises ValueError for what is no report."""
    try:
        plain: dict[str, Any] = json.loads(line)
        findings = [
            CheckFinding(**{**raw, "verdict": Verdict(raw["verdict"])}) for raw in plain["findings"]
        ]
        return Report(plain["node"], plain["when"], findings, plain["notes"], plain["seconds"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a health report: {error}") from None


def _row(finding: CheckFinding, width: int) -> str:
    action = f" [{finding.action}]" if finding.action in GRAVE else ""
    return f"{_word(finding):14} {finding.check:{width}}  {finding.text}{action}"


def _word(finding: CheckFinding) -> str:
    """A word of _ORDER: a failure without a grave action is only WARN."""
    if finding.verdict is Verdict.FAIL:
        return "FAIL" if finding.action in GRAVE else "WARN"
    return "UNKNOWN" if finding.verdict is Verdict.UNKNOWN else finding.verdict.value
