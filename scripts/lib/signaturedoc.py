"""Writes docs/reference/attribution.md from the signatures: `python scripts/lib/signaturedoc.py FILE`.

A test compares the file with `render()`, so the document can never be behind the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature

HEAD = """# Attribution by rules

<!-- Generated: python scripts/lib/signaturedoc.py docs/reference/attribution.md -->

When ranks fail, each agent reads the last 64 KiB that its faulty ranks wrote, before the decision to restart. It
looks for the signatures below. No service and no network are needed. It takes a few milliseconds per rank.

- **First cause:** what a fault is counts first, its place second, its time last. An echo (a peer that closed its
  connection, NCCL's watchdog, SIGTERM) never wins over a cause.
- **Where it is shown:** on the console (`rule: NAME (blame, confidence)`), in `result.json` (`first_cause.finding`,
  and `rule` of each fault), in the event log, and by `nvrx why`.
- **certain** rules with *elsewhere* exclude the node, if a node is left to take its place. At most 5 % of the job's
  nodes (at least one) are excluded in this way. Other rules never exclude.
  Where a rank raised an exception of its own, a rule blames the node only for the line of that exception.
- **The same failure three times:** a failure that is the user's (same line of the script and same message, whichever
  rank was the first) is said at its third time in a row, each after about the same time. With
  `--ft-attribution-stop-action no-restart` it ends the job with code 93.
- **A script that cannot start** ends the job at once, with code 1, or 93 with `no-restart`. Two errors count, if they
  ended the rank: a `SyntaxError` (or `IndentationError`, `TabError`) in a file that is not a library's; and in the
  first cycle a `ModuleNotFoundError` within 120 s on all nodes. Other ImportErrors, missing files and later cycles use
  restarts, because a file system may be away. So does a file with null bytes, which may be half written.
- A line counts only if the rank made no progress after it, and if the line does not say that the operation is tried
  again. Progress is a line such as `step 12`, or a heartbeat more than 2 s after the last byte of that log.
- **stop** needs the exception (or the last line, without a traceback) that ended the rank; else the action is restart.
- A rank that a signal has killed, or that hung, is never explained by a rule about the user, except
  `cgroup-out-of-memory`. SIGABRT counts as an error of the rank's own.
- A rank that hangs is compared with all others instead: see [catch hangs](../how-to/catch-hangs.md#who-hangs).

A line matches a signature if it holds one of the texts, in upper or lower case. Where the table shows a pattern,
the line has to match that, too (a regular expression of Python, on the line in lower case).

| signature | role | to blame | confidence | action | texts | pattern |
|---|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole document as Markdown."""
    return HEAD + "".join(_row(signature) + "\n" for signature in SIGNATURES)


def _row(s: Signature) -> str:
    blame = s.blame.value + (", the node if only its ranks print it" if s.one_node else "")
    cells = [f"`{s.name}`", s.role.value, blame, s.confidence.value, s.remedy.value]
    cells += [", ".join(map(_code, s.texts)), _code(s.pattern) if s.pattern else ""]
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
