"""Writes docs/reference/attribution.md from the signatures: `python scripts/lib/signaturedoc.py FILE`.

A test compares the file with `render()`, so the document can never be behind the code.
"""

import sys
from pathlib import Path

from nvrx_slurm.core.attribution.signatures import SIGNATURES

HEAD = """# Attribution by rules

<!-- Generated: python scripts/lib/signaturedoc.py docs/reference/attribution.md -->

When ranks fail, each agent reads the last 64 KiB that its faulty ranks wrote, before the decision to restart. It
looks for the signatures below. No service and no network are needed. It takes a few milliseconds per rank.

- **Headline:** the first line of the exception that ended the rank: behind the last traceback's last frame, or
  torchelastic's error file. Colours, time stamps and prefixes such as `[rank3]:` do not matter. Torch's advice and C++
  frames are context. An exception that only tells of another one (`ChildFailedError`) does not count.
- **Chains:** where no rule knows the headline as a cause, the exceptions before it count: what it was raised from, what
  was handled, the others of its group. One that is only printed above, or ended a thread, gives a guess.
- **Two owners:** where the table names two, the text cannot tell whose the failure is. Such a rule is a guess.
- **Slurm cancels a step** also because one of its ranks has ended: only a reason, or a cancelled job, is a cause.
- **Where a rule looks:** an *exception* rule looks at the exception that ended the rank; without one, at its last five
  lines, or at what native code said before SIGABRT. An *output* rule looks at all output behind the last progress.
- **Place before words:** the innermost frames before the script's own tell with what an exception is concerned: a
  file, a peer, a service, a lock, a tool. There the words of other classes do not count: an `EOFError` of a collective
  is no torn file. Common words (behind `?` below) are a guess unless their place proves the class.
- **Facts are never void:** what Slurm and drivers say with a number or a node (*field* in the table) counts also before
  later progress. A line that names a node blames that node, not the one that prints it.
- **Stopped ranks are evidence, too:** a victim may end before the culprit. What a rank said before the stop, or surely
  says by itself, goes to the coordinator before the node is ready, and the cause is judged again.
- **Order of evidence:** facts about a node and from Slurm go first. Then come hangs and signals that no program sends
  itself (SIGKILL, SIGSEGV, SIGBUS), then exceptions of a rank's own, then network errors, then echoes (a peer that
  closed its connection, NCCL's watchdog, SIGTERM). Time counts only among equals.
- **Where it is shown:** on the console (`rule: NAME (blame, confidence)` and `to do:`), in `result.json`
  (`first_cause.finding`, `class` and `what_to_do`, and `rule` of each fault), in the event log, and by `nvrx why`.
- **certain** rules with *elsewhere* exclude the node, if a spare is here. No rule does so where more than 5 %
  of the job's nodes, and more than one, would be excluded in all. Other rules never exclude.
  Where a rank raised an exception of its own, a rule blames the node only for the lines of that exception.
- **Quotations exclude no node:** an *exception* rule excludes a node only for a headline that a device library raised:
  torch's errors for devices and peers, a name such as `CUDARuntimeError` or `NVMLError`, or a `RuntimeError` that names
  CUDA, NCCL, NVML, NVIDIA or HIP before the first quote. What native code said before SIGABRT counts, too. An *output*
  rule excludes no node for the lines of an exception. Elsewhere such a rule is *likely* at most, with *restart*. Rules
  of a site are not different.
- **The same failure three times:** a failure that is the user's (same line of the script and same message, whichever
  rank was the first) is said at its third time in a row, each after about the same time. With
  `--ft-attribution-stop-action no-restart` it ends the job with code 93.
- **A script that cannot start** ends the job at once, with code 1, or 93 with `no-restart`. Two errors count, if they
  ended the rank: a `SyntaxError` (or `IndentationError`, `TabError`) in a file that is not a library's; and in the
  first cycle a `ModuleNotFoundError` within 120 s on all nodes. Other ImportErrors, missing files and later cycles use
  restarts, because a file system may be away. So does a file with null bytes, which may be half written. If all ranks
  end with the same exception [before the first step, twice](../explanation/what-follows-a-cause.md#the-start), the
  job ends.
- An *output* line counts only if the rank made no progress after it, and no line counts that says that the operation
  is tried again. Progress is a line such as `step 12`, or a heartbeat more than 2 s after the last byte of that log.
- **stop** needs the exception (or the last line, without a traceback) that ended the rank; else the action is restart.
- A rank that a signal has killed, or that hung, is never explained by a rule about the user, except the limits that
  the kernel enforces (memory, threads), nor by an echo. SIGABRT counts as an error of the rank's own.
- After a SIGKILL the agent reads how many processes of its cgroup the kernel has killed for lack of memory (`oom_kill`
  in `memory.events`, or in `memory.oom_control` of version 1). If there are more than before the cycle, it says so.
- A rank that hangs is compared with all others instead: see [catch hangs](../how-to/catch-hangs.md#who-hangs).

How often this is right: `tests/attribution/corpus` in the source holds more than 300 cases after public reports, a
third of them put aside while rules are written. `python tests/attribution/cases.py seen` prints the figures.

## Rules of a site

`--ft-signatures FILE` adds rules, which come before those below. The file is checked when the job starts.

```yaml
signatures:
  - name: fabric-brownout
    texts: ["fabric manager: brownout on * port"] # "*" stands for anything; no regular expressions
    class: network        # default: site
    blame: network        # user, node, network, storage, service, slurm, unknown (default)
    confidence: likely    # certain, likely (default), guess
    action: restart       # restart (default), elsewhere, stop, none
    where: output         # output (default), exception
    advice: Open a ticket with the network team.
```

`role` is cause (default), unclear or echo. A file holds up to 200 rules of up to 20 texts. A rule with
`confidence: certain`, `action: elsewhere`, `blame: node` excludes nodes, except for what may be a quotation.

## What to do

| class | what to do |
|---|---|
"""
TABLE = """
## Signatures

A line matches a signature if it holds one of the texts, in upper or lower case (`*`: anything). Where the table shows a
pattern, the line has to match that, too (a regular expression of Python, on the line in lower case). Behind `@` are
fields of the line and their values: what drivers, libraries, the kernel and Slurm print in a place of its own.

A line may name a node: by its short or long name, its address, or a rank. That node of the job is to blame, and not the
one that prints the line. A line about a node that is not of the job is a quotation, and no rule.

| class | signature | role | to blame | confidence | action | where | texts | pattern |
|---|---|---|---|---|---|---|---|---|
"""


def render():
    """The whole document as Markdown."""
    advice = {signature.topic: signature.advice for signature in reversed(SIGNATURES)}
    told = "".join(f"| {topic} | {text} |\n" for topic, text in reversed(advice.items()))
    return HEAD + told + TABLE + "".join(_row(signature) + "\n" for signature in SIGNATURES)


def _row(s):
    owners = [s.blame.value, *([s.or_blame.value] if s.or_blame else [])]
    blame = " or ".join(owners) + (", the node if only its ranks print it" if s.one_node else "")
    cells = [s.topic, f"`{s.name}`", s.role.value, blame, s.confidence.value, s.remedy.value]
    where = "exception" if not s.printed else "output, field" if s.is_field else "output"
    cells += [where, ", ".join(map(_code, s.texts))]
    cells.append(_code(s.pattern) if s.pattern else "")
    return "| " + " | ".join(cells) + " |"


def _code(text):
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
