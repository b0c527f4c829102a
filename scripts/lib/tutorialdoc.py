"""Runs the tutorial and rewrites its samples: `python scripts/lib/tutorialdoc.py docs/tutorial/first-job.md`.

The samples are the blocks of kind `console`. Each of their lines becomes the line of the run that is most like it,
in the order of the run. A test compares the page with a run, up to numbers, so a sample cannot go stale.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r"^(```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
# What the reader does, and after which line: once in each cycle, when its ranks have trained for a while.
STEPS = ((0, r"\[rank 0\] step 120 ", signal.SIGKILL), (1, r"\[rank 0\] step 240 ", signal.SIGSTOP))


def plain(text):
    """`text` without what differs from run to run: numbers, times, sums, which of two silent ranks is noticed first."""
    text = re.sub(r"rank \d+ was the first to be seen: |\d+ min (?=\d+ s\b)", "", text)
    text = re.sub(r"\d+ min\b", "60 s", text)  # a run of exactly one minute
    return re.sub(r"0x[0-9a-f.]+p[-+]\d+|[0-9a-f]{16}\.\.\.|\d+([:.]\d+)*", "N", text)


def rank_1(launcher):
    """The process of rank 1: the only descendant of the launcher that has RANK=1 and is a worker."""
    todo, found = [launcher], list[int]()
    while todo:
        pid = todo.pop()
        todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_worker = any(word.endswith(b"ddp.py") for word in words) and b"nvrx_slurm.cli.run" not in words
        if is_worker and b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            found.append(pid)
    (pid,) = found
    return pid


def run(page):
    """The lines of the page's first nvrx-run command, while the reader's faults happen to it."""
    (command,) = re.findall(r"^```bash\n(nvrx-run (?:.*\\\n)*.*)\n```", page, re.MULTILINE)
    words = [sys.executable, "-m", "nvrx_slurm.cli.run", *shlex.split(command.replace("\\\n", " "))[1:]]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    todo, cycle = list(STEPS), 0
    with tempfile.TemporaryDirectory() as where:
        Path(where, "examples").symlink_to(REPO / "examples")
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(words, cwd=where, env=env, text=True, **told) as launcher:  # type: ignore[call-overload]
            for line in launcher.stdout:
                if begun := re.search(r"cycle (\d+): group rank", line):
                    cycle = int(begun[1])
                if todo and cycle == todo[0][0] and re.search(todo[0][1], line):
                    os.kill(rank_1(launcher.pid), todo.pop(0)[2])
                line = re.sub(r"(sha256=[0-9a-f]{16})[0-9a-f]+", r"\1...", line)
                yield line.rstrip("\n").replace(socket.gethostname(), "n1")
    if launcher.returncode or todo:
        raise RuntimeError(f"the tutorial ended with {launcher.returncode}; not done: {todo}")


def render(page):
    """The page with the samples of a run, which takes about a minute and a half."""
    lines, at = list(run(page)), 0

    def sample(found):
        nonlocal at
        chosen = []
        for old in found[2].splitlines():
            likeness = [SequenceMatcher(None, plain(old), plain(new)).ratio() for new in lines[at:]]
            at += likeness.index(max(likeness)) + 1
            chosen.append(lines[at - 1] + "\n")
        return found[1] + "".join(chosen)

    return SAMPLE.sub(sample, page)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(Path(sys.argv[1]).read_text()))
