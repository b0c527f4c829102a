"""Makes a log tree of runs that are hostile, each in another way."""

import json
import os
import shutil
import socket
import stat
import time
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

from test_goodput import NODES, SPARE
from test_report import write
from test_status import GOOD
from test_why import RESULT

from nvrx_slurm.core.account.figures import to_json
from nvrx_slurm.logs.merged import Batch, MergedFile
from nvrx_slurm.types import Account

LOG = "cycle_0/node_0_n0/rank_0.err"
STATUS = {
    **GOOD,
    "restarts": {"used": 1, "allowed": 10, "by_kind": {}},
    "progress": {"ranks": 16, "stepped": 16, "steps": 41, "step_s": 0.5, "open": [[13, "step", 22.0]]},
    "account": {"node_seconds": {"productive": 3.0}, "allocated_s": 9.0, "productive_s": 3.0},
    "waits": {"why": "x", "until": GOOD["written"]},
    "slow": {"what": "rank 3", "ranks": [3], "lost_s": 2.0, "signs": "x"},
    "end": {"code": 1, "reason": "x"},
}
ENDED = {
    **RESULT,
    "ended": "2026-03-01T10:00:00+00:00",
    "cycles": 1,
    "account": to_json(Account(1000.0, 800.0, (*NODES, SPARE)), 100.0, 0.0),
    "first_cause": {**RESULT["first_cause"], "log": f"/x/{LOG}"},
    "faults": [{"cycle": 0, "kind": "exit", "rule": "", "host": "n2", "rank": 1, "at_s": 1.0}],
}
FOLDERS = (".", "events", "cycle_0", "cycle_0/node_0_n0", "merged")
FILES = (
    "events/coordinator.jsonl", "events/agent_0.jsonl", "cycle_0/hang.json", LOG, "merged/cycle_1.log", "merged.log",
    "merged.log.idx", "status.json", "result.json",
)  # fmt: skip
HEAD = b'{"nvrx":"1","core":"coordinator","now":1,"wall":1}\n'
STATE = b'{"v":2,"term":1,"owner":"","end":0,"sources":{"a":[0,0,0]}}\n'
TEXTS = {
    "empty": b"", "spaces": b" " * 99, "NUL": b"\0" * 99, "binary": bytes(range(256)) * 40, "UTF-16": b"\xff\xfe{\0}\0",
    "BOM": b"\xef\xbb\xbf{}", "lists": b"[" * 100_000, "dicts": b'{"a":' * 100_000, "nested": b"[" * 900 + b"]" * 900,
    "NaN": b'{"version": NaN, "code": NaN}', "infinite": b'{"version": 1e999}', "digits": b"9" * 1_000_000,
    "many": b"[" + b"[]," * 2_500_000 + b"1]", "dear": b"[" + b'{"a":1},' * 130_000 + b"1]",
    "a string": b'"' + b"a" * (9 << 20) + b'"', "a line": b"a" * (9 << 20), "lines": b"\n" * (9 << 20), "list": b"[]",
    "torn": b'{"version": 1, "wri', "records": STATE + b'[0,9e9,1,1]\n[0,3,1,1]\n{"file":[],"id":{}}\n[0]\n' * 999,
    "plans": HEAD + b'{"wall":1,"plans":[{"plan":{"cycle":9}},"to":[1]]}\n' * 9000,
}  # fmt: skip
VALUES = (None, [], {}, [[]], "", "x\x1b]2;x\x07\ud800", True, -1, 1e17, "9" * 300, [{}], [None], {"a": []})


def _sparse(path):
    path.write_bytes(HEAD)
    os.truncate(path, 3 << 30)
    with path.open("ab") as file:
        file.write(b'\n{"now":1,"wall":2}\n')


def _socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _of_another(path):
    path.write_text("{}")
    path.chmod(0)
    with suppress(PermissionError):
        os.chown(path, 4242, 4242)


def _device(minor):
    """Of the memory devices: 5 is /dev/zero. Only root can make one."""
    return lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor)) if os.geteuid() == 0 else None


def _link(target):
    return lambda path: path.symlink_to(target)


KINDS = {
    "nothing": lambda path: None, "a FIFO": os.mkfifo, "a socket": _socket, "a directory": Path.mkdir,
    "zeros": _device(5), "a device": _device(3), "another's": _of_another, "3 GB": _sparse,
    **{f"a link to {to}": _link(to) for to in ("nowhere", ".", "..", "/", "/dev/zero", "/dev/stdin", "/proc/self/mem")},
    "a link to itself": lambda path: path.symlink_to(path.name),
}  # fmt: skip


def good(run, word=""):
    """A whole run; `word` is in each of its files."""
    write(run, 3, 2, (f"boom {word}",))
    (run / LOG).parent.mkdir()
    (run / LOG).write_text(f"uncorrectable ECC error {word}\n")
    (run / "events/agent_0.jsonl").write_text(json.dumps({"nvrx": "1", "core": word}))
    (run / "events/agent_\x1b]2;x\x07.jsonl").write_text("{")
    (run / "events/coordinator_\x1b]2;x\x07.jsonl").write_text("{")
    (run / "cycle_0/hang.json").write_text(json.dumps({"ranks": [{"rank": 0, "frames": ["a"], "state": word}]}))
    merged, text = MergedFile(str(run / "merged.log"), 1, "x/r0"), b"0: %b\n" % word.encode()
    merged.open(LOG, 0)
    merged.append([Batch(LOG, text, len(text), 1)])
    merged.close()
    (run / "merged").mkdir()
    (run / "merged/cycle_1.log").symlink_to("../merged.log")
    job = {**GOOD["job"], "name": word or "llama"}
    (run / "status.json").write_text(json.dumps({**STATUS, "job": job, "written": time.time()}))
    (run / "result.json").write_text(json.dumps({**ENDED, "reason": word, "summary": word, "ended_by": word}))
    return run


def _places(value, place=()):
    """Of all values in a value."""
    yield from [place] if place else []
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, child in inner:
        yield from _places(child, (*place, key))


def changed(content, times):
    """The content with one value of another kind; so many for each value."""
    for number, place in enumerate(place for place in _places(content) for _ in range(times)):
        found = inner = deepcopy(content)
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = VALUES[number % len(VALUES)]
        yield found


def make(tree, home):
    """The runs, by what is wrong with them. Big texts are links to one file in `home`."""
    template, secret = good(home / "good"), good(home / "secret", "SECRET")
    for path in (secret, *secret.rglob("*")) if os.geteuid() == 0 else ():
        os.lchown(path, 4242, 4242)
    for name, text in TEXTS.items():
        (home / name).write_bytes(text)
    runs = {}
    for place in (*FOLDERS, *FILES):
        texts = {name: partial(os.link, home / name) for name in TEXTS if place in FILES}
        to_secret = lambda path, place=place: path.symlink_to(secret / place)  # noqa: E731
        for name, make_it in {**KINDS, **texts, "a link to a secret": to_secret}.items():
            if place == LOG and (name == "3 GB" or len(TEXTS.get(name, b"")) > 1 << 20):
                continue  # nvrx logs shows what a rank has written, all of it
            runs[f"{place} is {name}"] = run = tree / str(len(runs)) / "r0"
            shutil.copytree(template, run, symlinks=True)
            path = run if place == "." else run / place
            shutil.rmtree(path) if place in FOLDERS else path.unlink()
            if place not in ("result.json", LOG, "."):
                (run / "result.json").unlink()
            make_it(path)
    for name, content in (("status.json", STATUS), ("result.json", ENDED)):
        for number, other in enumerate(changed(content, 2)):
            runs[f"{name} {number}"] = run = tree / f"{name}{number}" / "r0"
            run.mkdir(parents=True)
            (run / name).write_text(json.dumps(other))
    return runs
