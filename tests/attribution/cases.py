# ruff: noqa: E501 - lines as programs print them
"""The corpus of public reports (`corpus/*.yaml`): loads it, gives its cases their shapes, and scores the rules on it.

`python tests/attribution/cases.py [seen|aside]` prints the table by class and the pairs that are confused.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nvrx_slurm.core.attribution.signatures import SIGNATURES
from nvrx_slurm.core.attribution.verdict import JudgedCause, judge
from nvrx_slurm.declared import replace
from nvrx_slurm.node.output import faults
from nvrx_slurm.types import Blame, Confidence, FaultKind, RankFault, Remedy

PACKAGES = "/opt/venv/lib/python3.11/site-packages"
CORPUS = Path(__file__).with_name("corpus")
PER_NODE, NODES = 2, 4
TOPICS = {signature.name: signature.topic for signature in SIGNATURES} | {"python-exception": "code"}
FRAMES = """Traceback (most recent call last):
  File "/workspace/train.py", line 412, in <module>
    main(args)
  File "/workspace/train.py", line 301, in main
    loss = step(batch)
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1739, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
"""
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
AT_EXIT = (
    "[rank{r}]:[W302 10:11:13.123456789 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not "
    "called before program exit, which can leak resources. For more info, please see "
    "https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())\n"
)
PEERS = (
    "[rank{r}]:[E302 10:11:1{n}.1 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=8{n}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600021 milliseconds",
    "[rank{r}]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there "
    "was a network error, NCCL version 2.21.5",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.{r}]:471{n}",
    "[rank{r}]:[W302 10:11:1{n}.2 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=69): failed to recv, got 0 bytes",
    "n3:47{n}:99 [{r}] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n7<511{n}9>",
)
TORCHRUN = """E0302 10:11:15.123000 4600 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: 0 (pid: 4711) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-02_10:11:15
  host      : node3
  rank      : 3 (local_rank: 0)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


class Case(NamedTuple):
    """One report of one rank, and what a person says of it."""

    id: str
    source: str
    topic: str  # or several, any of which is right, between bars
    blames: tuple[str, ...]
    exclude: bool
    code: int
    lines: dict[str, Any]
    shape: tuple[str, ...]


class Try(NamedTuple):
    """What the rules say about one case in one shape."""

    id: str
    topic: str
    found: str
    blame: str
    right: bool
    confident: bool
    wrong_exclusion: bool


def is_aside(name: str) -> bool:
    """A third of the corpus is put aside: no rule is written after it."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 3 == 0


@cache
def singles() -> tuple[Case, ...]:
    """All cases of one rank."""
    files = [path for path in sorted(CORPUS.glob("*.yaml")) if path.name != "multi.yaml"]
    return tuple(_case(raw) for path in files for raw in yaml.safe_load(path.read_text()))


@cache
def multis() -> tuple[dict[str, Any], ...]:
    """All cases of several ranks."""
    return tuple(yaml.safe_load((CORPUS / "multi.yaml").read_text()))


def _case(raw: dict[str, Any]) -> Case:
    lines = {key: raw[key] for key in ("before", "text", "error", "at", "after", "out", "cuda") if key in raw}
    shape = tuple(raw.get("shape", "").split())
    known = len(lines) + len({"id", "from", "class", "blame", "exclude", "code", "shape", "not"} & raw.keys())
    assert known == len(raw), raw["id"]
    topic, out, code = "|".join(_all(raw["class"])), raw.get("exclude", False), raw.get("code", 1)
    return Case(raw["id"], raw["from"], topic, _all(raw["blame"]), out, code, lines, shape)


def _all(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _frames(at: str) -> str:
    """A traceback whose innermost frames are those of `at`: PATH:LINE in FUNCTION, between semicolons."""
    text = FRAMES.partition('  File "/opt')[0]
    for one in at.replace("SP/", f"{PACKAGES}/").replace("PY/", "/usr/lib/python3.11/").split("; "):
        path, _, function = one.partition(" in ")
        file, _, line = path.rpartition(":")
        text += f'  File "{file}", line {line}, in {function}\n    call()\n'
    return text


# --- shapes -----------------------------------------------------------------------------------------------------------


def _training() -> str:
    """64 KiB of what trainers print."""
    lines, size, step = [], 0, 0
    while size < 64 * 1024:
        step += 1
        lines.append(
            f" iteration {step:8d}/  500000 | consumed samples: {step * 192:12d} | elapsed time per iteration (ms): 812.{step % 10}"
            f" | learning rate: 2.999E-04 | lm loss: 2.{step:06d}E+00 | loss scale: 1.0 | grad norm: 0.{step % 1000:03d} |\n"
            f"{{'loss': 2.{step}, 'grad_norm': 0.4, 'learning_rate': 1e-05, 'epoch': 0.{step}}}\n"
            f"\r{step % 100:3d}%|####      | {step}/99999 [00:{step % 60:02d}<9:42:50,  1.21it/s]"
        )
        size += len(lines[-1])
    return "".join(lines) + "\n"


def written(case: Case, shape: tuple[str, ...]) -> tuple[str, str, str]:
    """(stderr, stdout, error.json or "") of a case in a shape."""
    part = case.lines
    error = part.get("error", "")
    message = error + (ADVICE if part.get("cuda") else "")
    trace = (_frames(part["at"]) if "at" in part else FRAMES) + message.rstrip("\n") + "\n" if error else ""
    own = trace.splitlines()
    rank = "[rank3]: " if "ranked" in shape else ""
    if "interleaved" in shape:
        other = "[rank4]: " if rank else ""
        own = [line for one in own for line in (rank + one, other + one)]
    else:
        own = [rank + one for one in own]
    lines = [*part.get("before", "").splitlines(), *part.get("text", "").splitlines(), *own]
    lines += part.get("after", "").splitlines()
    if "peers" in shape:
        lines += [PEERS[n % len(PEERS)].format(r=4 + n % 4, n=n % 10) for n in range(40)]
    text = "\n".join(lines) + "\n"
    text += AT_EXIT.format(r=3) if "exit" in shape else ""
    text += TORCHRUN.format(code=case.code) if "torchrun" in shape else ""
    if "times" in shape:
        stamp = (
            "2026-03-02 10:11:12,345 - ERROR - ",
            "[2026-03-02 10:11:12.345] ",
            "2026-03-02T10:11:12.345678Z stderr F ",
        )
        text = "".join(stamp[len(case.id) % 3] + line for line in text.splitlines(keepends=True))
    if "ansi" in shape:
        text = "".join(f"\x1b[31m{line.rstrip()}\x1b[0m\n" for line in text.splitlines())
    text = _training() + text if "training" in shape else text
    record = ""
    if "record" in shape and error:
        kind, _, rest = message.partition(": ")
        told = {"message": f"{kind.rpartition('.')[2]}: {rest}", "extraInfo": {"py_callstack": trace, "timestamp": "1"}}
        record = json.dumps({"message": told})
    return text, part.get("out", ""), record


def fault_of(case: Case, shape: tuple[str, ...], where: RankFault, folder: Path) -> RankFault:
    """The fault that an agent reports."""
    err, out, record = written(case, shape)
    paths = [folder / f"rank.{end}" for end in ("err", "out", "json")]
    for path, text in zip(paths, (err, out, record), strict=True):
        path.unlink(missing_ok=True)
        if text:
            path.write_text(text)
    fault = faults.from_exit_code(case.code, where)
    assert fault is not None
    return faults.with_details(fault, paths[2], paths[0])


# --- scores -----------------------------------------------------------------------------------------------------------


def topic_of(verdict: JudgedCause) -> str:
    """The class of the failure that the verdict names."""
    if verdict.rule in TOPICS:
        return TOPICS[verdict.rule]
    if verdict.cause.exit_code == 137:
        return "killed"
    kinds = {FaultKind.HANG: "hang", FaultKind.SIGNAL: "killed", FaultKind.NODE_LOST: "node-lost"}
    return kinds.get(verdict.cause.kind, "code")


def tries(cases: tuple[Case, ...]) -> Iterator[Try]:
    """Each case bare, and in its shape."""
    where = RankFault(FaultKind.SPAWN, "n1", 1, 3, 1, 4711)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            for shape in {(), case.shape}:
                verdict = judge([fault_of(case, shape, where, Path(folder))], NODES)
                assert verdict is not None
                found, blame = topic_of(verdict), verdict.blame.value
                right = found in case.topic.split("|") and blame in case.blames
                sure = verdict.confidence is not Confidence.GUESS and verdict.blame is not Blame.UNKNOWN
                out = verdict.remedy is Remedy.ELSEWHERE and verdict.confidence is Confidence.CERTAIN
                name = "+".join([case.id, *shape])
                yield Try(name, case.topic, found, blame, right, sure, out and not case.exclude)


def ranks_right(case: dict[str, Any], folder: Path) -> tuple[bool, bool, str]:
    """(the cause is right, and class and blame too, what was said) of a case of several ranks."""
    by_id = {one.id: one for one in singles()}
    found = []
    for rank, what in case["faults"]:
        node = rank // PER_NODE
        where = RankFault(FaultKind.SPAWN, f"n{node}", node, rank, rank % PER_NODE, 4711 + rank)
        if what == "lost":
            found.append(RankFault(FaultKind.NODE_LOST, f"n{node}", node, message="its connection was closed"))
        elif what == "hang":
            found.append(replace(where, kind=FaultKind.HANG, message="no heartbeat for 600 s"))
        else:
            found.append(fault_of(by_id[what], by_id[what].shape, where, folder))
    verdict = judge(found, NODES)
    assert verdict is not None
    causes = case["cause"] if isinstance(case["cause"], list) else [case["cause"]]
    name = verdict.cause.rank if verdict.cause.rank >= 0 else verdict.cause.host
    blames = [case["blame"]] if isinstance(case["blame"], str) else case["blame"]
    right = name in causes
    return (
        right,
        right and topic_of(verdict) == case["class"] and verdict.blame.value in blames,
        (f"{case['id']}: {name} {topic_of(verdict)} {verdict.blame.value}"),
    )


def scores(aside: bool) -> dict[str, float]:
    """The figures of one part of the corpus."""
    done = list(tries(tuple(case for case in singles() if is_aside(case.id) == aside)))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [ranks_right(case, Path(folder)) for case in multis() if is_aside(case["id"]) == aside]
    return {
        "tries": len(done),
        "right": sum(one.right for one in done) / len(done),
        "confident mistakes": sum(one.confident and not one.right for one in done) / len(done),
        "wrong exclusions": sum(one.wrong_exclusion for one in done),
        "jobs": len(ranks),
        "cause right": sum(right for right, _, _ in ranks) / len(ranks),
        "cause, class and blame right": sum(all_right for _, all_right, _ in ranks) / len(ranks),
    }


def main(part: str) -> None:
    """Print the figures; of the part that is put aside without its cases."""
    for aside in (False, True):
        print("put aside:" if aside else "seen:", {key: round(value, 3) for key, value in scores(aside).items()})
    if part not in ("seen", "aside"):
        return
    done = list(tries(tuple(case for case in singles() if is_aside(case.id) == (part == "aside"))))
    by_topic, right = Counter(one.topic for one in done), Counter(one.topic for one in done if one.right)
    for topic, count in sorted(by_topic.items()):
        print(f"{topic:26} {right[topic]:4} of {count:4}")
    for pair, count in Counter((one.topic, f"{one.found}/{one.blame}") for one in done if not one.right).most_common():
        print(f"  {pair[0]} -> {pair[1]}: {count}")
    if part == "aside":  # its cases stay unread
        return
    for one in done:
        if not one.right:
            mark = "EXCLUDED" if one.wrong_exclusion else "confident" if one.confident else ""
            print(f"    {one.id}: {one.topic} -> {one.found}/{one.blame} {mark}")
    with tempfile.TemporaryDirectory() as folder:
        for case in multis():
            if not is_aside(case["id"]) and not (told := ranks_right(case, Path(folder)))[1]:
                print(f"    {'' if told[0] else 'CAUSE '}{told[2]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
