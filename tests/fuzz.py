"""Gives damaged bytes to every parser of what others have written: files, frames, answers, outputs, variables.

    python tests/fuzz.py [--inputs 100000] [--seed N] [PARSER]...

A parser may raise its own error, and nothing else, and take 50 ms. Exit code 1: one did not, with the input.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.extend(str(Path(__file__).parent / where) for where in ("views", "lib", "../scripts/lib"))

from click import UsageError as ClickUsageError
from test_report import write
from test_status import GOOD
from test_why import RESULT

from nvrx_slurm.attribution import client, llm, web
from nvrx_slurm.checkpoint import messages as keeping
from nvrx_slurm.config import files, nvhcd, signatures, site
from nvrx_slurm.config.layers import SETTINGS
from nvrx_slurm.control.messages import FROM_AGENTS, FROM_COORDINATOR
from nvrx_slurm.core import event_log, preload, progress, redact, samples
from nvrx_slurm.core.attribution import evidence, raised, reached
from nvrx_slurm.core.bounded_json import first_value, parsed
from nvrx_slurm.core.checkpoint import files as checkpoints
from nvrx_slurm.core.logs import lines, printable
from nvrx_slurm.core.logs.index import Index
from nvrx_slurm.declared import plain
from nvrx_slurm.errors import ProtocolError, UsageError
from nvrx_slurm.health import outcome
from nvrx_slurm.health.check import ACTIONS, CONTEXTS
from nvrx_slurm.health.checks import kernel_log, node_service, storage
from nvrx_slurm.logs import wire
from nvrx_slurm.monitor import wire as monitor_wire
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.slurm.api import text as slurm
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.types import FaultKind, RankFault, Ready, Stop
from nvrx_slurm.views import html, report, status, why
from tests.core.test_event_log import agent_log

MOST_S = 0.05
TOKENS = (
    b"[", b"{", b"}", b'"', b"\\", b":", b",", b"\0", b"\n", b"\r", b" ", b"\xff", b"\xf0\x9f\x98\x80", b"\\ud800",
    b"-", b"0", b"9" * 30, b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b"[1-9999999]", b"=", b"\x80\x80\x80\x01",
)  # fmt: skip


class Parser(NamedTuple):
    """`call`: of the bytes; `own`: the error that it may raise; `samples`: what it should take; `most`: bytes."""

    call: Callable[[bytes], object]
    own: Any
    samples: tuple[bytes, ...]
    most: int = 1 << 14


class _Never(Exception):
    """Of a parser that raises nothing."""


def _settings(text):
    """Each kind of value, as it comes from a flag, a variable or YAML."""
    for one in SETTINGS.values():
        with suppress(ValueError):
            one.kind.parse(text)


def _guess(text):
    preload.guess(text, 1, lambda _: "")


def _output(text):
    data, fault = text.encode(), RankFault(FaultKind.EXIT, "n1", 0, 0, 0, 1, 1, text[:500], text)
    evidence.examine(fault, data, data)
    reached.iteration(data), raised.failing_line(text), raised.frames(text), raised.raised_in(raised.clean(text))


def _story(found):
    story = why._story(found, Path("/nonexistent"))
    list(why._in_words(story, Path("/nonexistent")))


def _mounts(text):
    storage.mounts(SimpleNamespace(text=lambda *_: text))


def _page_of_events(data):
    """The pages that event logs tell, with nothing else of the run."""
    with TemporaryDirectory(dir="/dev/shm") as run:
        Path(run, "events").mkdir()
        Path(run, "events/coordinator.jsonl").write_bytes(data)
        html.page(report.facts_of(Path(run)), "")


def _events():
    with TemporaryDirectory() as run:
        write(Path(run), 2, 2)
        return Path(run, "events/coordinator.jsonl").read_bytes()


STATE = b'{"v":2,"term":1,"owner":"o","end":0,"sources":{"a":[0,0,0]}}\n[0,3,3,1]\n{"id":1,"file":"b","rank":1}\n'
JOB = (
    "JobId=7 JobName=a b UserId=u ExitCode=0:0 JobState=RUNNING NodeList=n[1-3,7] TimeLimit=1-00:00:00 RunTime=00:01\n"
)
NODE = "NodeName=n1 State=IDLE+DRAIN Reason=nvrx:a:b [root@2026-01-01T00:00:00] Port=1\n"
OUTPUT = 'iteration 10 loss 3\rstep 11\nTraceback (most recent call last):\n  File "/w/t.py", line 3\nValueError: x\n'
REPLY = {"choices": [{"message": {"content": '{"story": "s", "rule": "agree", "citations": []}'}}]}
REPORT = '{"node":"n","when":"w","findings":[],"notes":[],"seconds":1}'
READY = Ready(1, 2, 3)
OFFER = keeping.Offer(0, 2, 0, 20, 64, 7, "10.0.0.1 4000")
MESSAGE = FROM_AGENTS.encode(READY)
METRICS = {**GOOD, "restarts": {"used": 1, "allowed": 2, "by_kind": {}}}
# Name: the parser, its error, and samples. Of JSON as the readers of log trees take it, text, bytes, and files of YAML.
DOCUMENTS = {
    "json": (lambda found: json.dumps(found, indent=1), RESULT),
    "status": (lambda found: status._told(Path("/7/r0"), found, GOOD["written"], True), GOOD),
    "metrics": (samples.samples, METRICS),
    "result": (_story, RESULT),
    "record": (event_log.decode, {"type": "Ready", **plain(READY)}),
    "model": (lambda found: llm._checked(found, ["a line of a log"]), REPLY),
    "attribution": (client._answer_in, {"status": "completed", "recommendation": {"action": "STOP", "reason": "r"}}),
}
TEXTS = {
    "first value": (first_value, ValueError, json.dumps(GOOD)),
    "event log": (lambda text: event_log.replay(text.splitlines(True)), _Never, "\n".join(agent_log())),
    "output": (_output, _Never, OUTPUT),
    "secrets": (lambda text: redact.Redactor(["ann"]).clean(text), _Never, "token=a Bearer x 10.0.0.1 ann hf_12345678"),
    "health report": (outcome.from_json, ValueError, REPORT),
    "node service": (node_service.parse_output, _Never, '{"fail_count": 0}'),
    "kernel log": (kernel_log.parsed, _Never, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU"),
    "host list": (nodelist.expand, UsageError, "n[01-03,7]-ib[0-1],m"),
    "counts": (nodelist.different_counts, UsageError, "2(x3),1"),
    "job": (lambda text: slurm.job(text, 7), SlurmError, JOB),
    "nodes": (slurm.nodes, SlurmError, NODE),
    "configuration": (slurm.config, _Never, "Prolog[0] = /a\nX = (null)\n"),
    "refusal": (lambda text: slurm.error("scontrol", text), _Never, "Job 7 does not exist."),
    "script": (_guess, _Never, "import torch, numpy as np\nif x:\n  from a.b import c\n"),
    "mounts": (_mounts, ValueError, r"24 1 0:22 / /mnt/a\040b rw,nosuid shared:7 - nfs4 server:/x rw,vers=4.2"),
    "settings": (_settings, _Never, "4:6", "a=1,b=2", "127.0.0.1:29400", "10m", "SIGUSR1@60"),
}
BYTES = {
    "from an agent": (FROM_AGENTS.decode, ProtocolError, MESSAGE),
    "from a coordinator": (FROM_COORDINATOR.decode, ProtocolError, FROM_COORDINATOR.encode(Stop(1, 2, "r"))),
    "to a keeper": (keeping.requests.decode, ProtocolError, keeping.requests.encode(keeping.Join(0, 2, 2, 9))),
    "between keepers": (keeping.between.decode, ProtocolError, keeping.between.encode(OFFER)),
    "monitor": (monitor_wire.decode, monitor_wire.WireError, monitor_wire.encode("init", rank=3)),
    "log sources": (wire.opened, ProtocolError, wire.message(wire.OPEN, [[1, 0, "f", 3]])),
    "log chunk": (wire.to_chunk, ProtocolError, wire.from_chunk(wire.Chunk(1, 0, 3, 9, b"a\n"))),
    "log index": (lambda data: Index.load(data, 10), _Never, STATE),
    "lines": (lambda data: lines.Lines(b"0: ").take(data, True), _Never, b"a\rb\xff\0\n"),
    "printable": (lambda data: printable.printable(data.decode("utf-8", "replace")), _Never, b"\x1b[2J\xe2\x80\xae"),
    "events": (_page_of_events, (*progress.DAMAGE, ClickUsageError), _events()),
    "web": (web.json_object, web.Trouble, b'{"a": 1}'),
}
FILES = {
    "section": (files.read_section, b"fault_tolerance:\n  a: &x [1, 2.5]\n  b: *x\n"),
    "site file": (
        lambda path: site.load(path, CONTEXTS, ACTIONS),
        b"expect: {cpus: 64}\nchecks: {a: {when: [prolog]}}\n",
    ),
    "nvhcd": (nvhcd.load, b"group: a\nargs: [--no-slurm]\ntimeout: 5\n"),
    "signatures": (signatures.read_signatures, b"signatures:\n- {name: abc, texts: [some text], advice: x}\n"),
}
CHECKPOINTS = {
    "a.pt": b"PK\3\4" + b"x" * 9 + b"PK\5\6" + b"\0" * 18,
    "a.safetensors": b"\x20" + b"\0" * 7 + b'{"a": {"data_offsets": [0, 4]}}abcde',
    "a.json": b'{"a": [1]}',
    "a.metadata": b"\x80\x04\x95\x20" + b"\0" * 7 + b"}\x94\x8c\rrelative_path\x8c\x01ds.",
    "a.index.json": b'{"weight_map": {"a": "b"}}',
}
SHORT = {"settings": 512, "script": 4096}  # bytes: of 150 kinds; of Python's own parser


def _of_document(call):
    def read(data):
        return call(found) if isinstance(found := parsed(data), dict) else None

    return read


def _of_file(call):
    def read(data):
        with NamedTemporaryFile(dir="/dev/shm") as file:
            Path(file.name).write_bytes(data)
            return call(file.name)

    return read


def _of_checkpoint(name):
    def read(data):
        take = len(data), lambda at, size: data[at : at + size]
        return checkpoints.damage(name, *take), checkpoints.needed(name, *take)

    return read


def parsers():
    """All of them, by name."""
    for name, (call, sample) in DOCUMENTS.items():
        yield name, Parser(_of_document(call), progress.DAMAGE, (json.dumps(sample).encode(),))
    for name, (call, own, *texts) in TEXTS.items():
        samples = tuple(text.encode() for text in texts)
        yield name, Parser(partial(_decoded, call), own, samples, SHORT.get(name, 1 << 14))
    for name, (call, own, sample) in BYTES.items():
        yield name, Parser(call, own, (sample,))
    for name, (call, sample) in FILES.items():
        yield name, Parser(_of_file(call), UsageError, (sample,), 2048)  # PyYAML reads 100 kB in a second
    for name, sample in CHECKPOINTS.items():
        yield name, Parser(_of_checkpoint(name), _Never, (sample,))


def _decoded(call, data):
    return call(data.decode("utf-8", "replace"))


PARSERS = dict(parsers())


def inputs(parser, seed):
    """The samples, each damaged in another way."""
    samples, rng = parser.samples, random.Random(f"{seed}")
    while True:
        data = bytearray(rng.choice(samples))
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
            token, other, byte = rng.choice(TOKENS), rng.choice(samples), bytes([rng.randrange(256)])
            times = rng.choice((2, 3, 20, 100, 5000))
            data[at:end] = rng.choice(
                (
                    token,
                    token * times,
                    token + data[at:end],
                    data[at:end] * times,
                    byte,
                    other[rng.randrange(len(other)) :],
                )
            )
            del data[parser.most :]
        yield bytes(data)


def wrong(parser, data):
    """What a parser does that it may not; "" for nothing."""
    began = time.thread_time()
    try:
        parser.call(data)
    except parser.own:
        pass
    except Exception as error:
        return repr(error)
    took_s = time.thread_time() - began
    return f"{took_s:.2f} s" if took_s > MOST_S else ""


def run(name, count, seed):
    """What one parser did that it may not. A time counts if it is too long three times."""
    parser, found = PARSERS[name], []
    for _, data in zip(range(count), inputs(parser, f"{name} {seed}"), strict=False):
        if wrong(parser, data) and wrong(parser, data) and (why_not := wrong(parser, data)):
            found.append(f"{name}: {why_not}: {data[:300]!r} ({len(data)} bytes)")
    return found


def main():
    """Returns the exit code."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--inputs", type=int, default=100_000)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("parsers", nargs="*", metavar="PARSER")
    asked = words.parse_args()
    failed = 0
    for name in asked.parsers or PARSERS:
        began, found = time.monotonic(), run(name, asked.inputs, asked.seed)
        took_s = time.monotonic() - began
        print(f"{name}: {asked.inputs} inputs, seed {asked.seed}, {len(found)} wrong, {took_s:.0f} s", flush=True)
        print("".join(f"{one}\n" for one in found[:5]), end="")
        failed += bool(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
