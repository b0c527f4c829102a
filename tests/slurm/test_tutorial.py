"""The second tutorial as its reader types it: the page's commands run in its order, and its samples come out."""

import re
import subprocess
import sys
from functools import partial

import pytest
from minicluster import MiniCluster
from nvrx_job import wait_in
from test_docs import DOCS, REPO, clean_environment, fences
from waits import WAIT_S

PAGE = DOCS / "tutorial/slurm-job.md"
# Times, pids, sums, and what ranks do at this moment. Nodes, ranks, cycles and counts have one digit and stay.
VARIES = re.compile(r": state .*|; if they hang.*|\d+ min( \d+ s)?|\+?\d+([.:]\d+)+( s)?|\d\d+( s)?")


def facts(text):
    """The lines without what differs from run to run."""
    return {VARIES.sub("N", line) for line in text.splitlines()}


def typed(text, root):
    """What the commands print, in a shell that goes on where the last one was, or in the clone if they say so."""
    shell = root / "shell"
    if "in the clone" in text:
        text = f"(cd {REPO}\n{text})"
    lines = f". {shell}\n{text}\nexport -p > {shell}\necho cd $PWD >> {shell}\n"
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": WAIT_S}
    done = subprocess.run(["bash", "-euc", lines], env=clean_environment(), **told)
    assert done.returncode == 0, done.stdout
    return done.stdout


def here(page_text, root, said):
    """The text for this run: its folders, the venv of the test, which installs nothing, and the process to kill."""

    def kill(found):
        return found[1] + re.findall(r"^rank 1 .* pid (\d+)", said, re.MULTILINE)[-1]

    text = page_text.replace("/tmp/", f"{root}/")
    text = re.sub(r"^venv=.*", f"venv={sys.prefix}", text, flags=re.MULTILINE)
    return re.sub(r"^(kill -\w+ )\d+", kill, text, flags=re.MULTILINE)


@pytest.mark.matrix
@pytest.mark.torch
def test_the_commands_of_the_tutorial_on_slurm_print_its_samples(cluster_root, needs_slurm):
    (cluster_root / "shell").write_text(f"cd {REPO}\n")
    said, seen = "", ""

    def came(sample):
        output = cluster_root / "job/nvrx_logs/nvrx_1.out"
        return facts(sample) <= facts(said + (output.read_text() if output.exists() else ""))

    try:
        for fence in fences(PAGE):
            text = here(fence.text, cluster_root, said)
            if fence.info:
                said += typed(text, cluster_root)
                continue
            assert wait_in(cluster_root / "job/nvrx_logs", partial(came, text), WAIT_S), f"{fence}:\n{text}\n{said}"
            seen += text
        assert MiniCluster(cluster_root / "mc").scan() == []
        for key in ("rank 1 (local rank 0", "new: n3 as", "ended with code 0", "lost nodes: n2", "spares used: n3"):
            assert key in seen
    finally:
        MiniCluster(cluster_root / "mc").down()
