"""What a job went through is one story over the terms of its coordinators; each term can be replayed."""

from __future__ import annotations

import os
import signal

from agent_harness import UNTIL_TOLD, Rig, kill, up
from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main


def test_result_and_logs_tell_of_all_terms(rig: Rig) -> None:
    """Term 1: a rank is killed, then the coordinator's node is lost. Term 2: a rank is killed again."""
    script = rig.script(UNTIL_TOLD)
    first, second, third = rig.nodes(3, "2:3", script, "--max-restarts=5")
    third.line("this node is a hot spare")
    up(first, 0)
    os.kill(up(second, 0)[1], signal.SIGKILL)
    up(second, 1)
    kill(first, up(first, 1)[1])
    up(second, 2)
    os.kill(up(third, 2)[1], signal.SIGKILL)
    assert {up(second, 3)[0], up(third, 3)[0]} == {0, 1}
    rig.open("end3")
    assert [second.wait(), third.wait()] == [0, 0]
    result = rig.result
    assert (result["code"], result["cycles"], result["restarts_used"], len(result["lost_nodes"])) == (0, 4, 3, 1)
    causes = [restart["cause"] for restart in result["restarts"]]
    assert [word in cause for word, cause in zip(("SIGKILL", "node 0 ", "SIGKILL"), causes, strict=True)] == [True] * 3
    times = [restart["at_s"] for restart in result["restarts"]]
    assert times == sorted(times) and times[0] < result["duration_s"] > times[-1]
    (last,) = [line for line in second.said + third.said if line.startswith("job ends")]
    assert "3 restarts, 1 lost node" in last
    logs = sorted(path.name for path in rig.run_dir.glob("events/coordinator*"))
    assert len(logs) >= 2 and logs[0] == "coordinator.jsonl"  # a contested election may take several terms
    replayed = CliRunner().invoke(main, ["replay", str(rig.run_dir)])
    assert replayed.exit_code == 0 and replayed.output.count("the same decisions") == 2 * 3 + len(logs)
