"""What the console of the coordinator's node and result.json tell about faults anywhere in the job."""

from __future__ import annotations

import re
from pathlib import Path

from agent_harness import Rig

# Rank 1 fails in cycle 0; rank 0, connected to it, says that it has noticed.
PEERS = """
import socket
path = "peer"  # relative: a socket path is short
if CYCLE == 0 and RANK == 0:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        say("listening")
        peer, _ = server.accept()
        peer.recv(1)
        print("Traceback (most recent call last):\\n  Connection closed by peer", file=sys.stderr, flush=True)
        forever()
elif CYCLE == 0:
    gate()
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(path)
    raise ValueError("the data is bad")  # here
"""


def test_the_rank_that_failed_is_told_with_its_exception_its_line_and_its_log(rig: Rig) -> None:
    script = rig.script(PEERS)
    nodes = rig.nodes(2, "2", script, "--max-restarts=1")
    nodes[0].line("listening")
    rig.open()
    assert [one.wait() for one in nodes] == [0, 0]
    said = nodes[0].text
    fault = said.index("exited with code 1: ValueError: the data is bad; restart 1 of 1")
    line = next(n for n, text in enumerate(Path(script).read_text().splitlines(), 1) if text.endswith("# here"))
    assert f"at: {script}:{line}\n" in said[fault:]
    assert re.search(r"log: \S+/cycle_0/node_1_\S+/rank_1\.err\n", said[fault:])
    told = rig.result
    assert "finished after 1 restart, " in said and told["summary"] in said
    fault = told["faults"][0]
    assert (fault["cycle"], fault["rank"], fault["infra_rank"], fault["kind"]) == (0, 1, 1, "exit") and fault["time"]
    assert (told["code"], told["restarts_used"], told["first_cause"]) == (0, 1, None)
    assert 0 < told["down_s"] < told["duration_s"] and told["restarts"][0]["cycle"] == 0
