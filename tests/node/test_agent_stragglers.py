"""Slow ranks in a real job: gloo DDP on two nodes with four ranks each."""

import pytest
from agent_harness import REPO
from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main

pytestmark = pytest.mark.process


SLOW, LIGHT, WORK_S, WINDOW_S = 5, 2, 0.04, 3.0
# A rank works 20 % longer, as by a slow GPU. Another one has half of the work, so that it waits most. One section is of
# NVRx's API, as its programs write it.
SCRIPT = f"""
import torch, torch.distributed as dist
from nvidia_resiliency_ext import straggler
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
torch.set_num_threads(1)
straggler.Detector.initialize(node_name=f"node{{GROUP}}")
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
client = RankMonitorClient()
client.init_workload_monitoring()
work_s = {WORK_S} * {{{SLOW}: 1.2 if os.environ.get("SLOW") else 1.0, {LIGHT}: 0.5}}.get(RANK, 1.0)
over = torch.zeros(1)
say("up", CYCLE, "group", GROUP, "pid", os.getpid())
while not over:
    client.start_section("forward")
    loss = model(torch.ones(4, 8)).sum()
    with straggler.Detector.detection_section("work"):
        time.sleep(work_s)
    client.end_section("forward")
    with straggler.Detector.detection_section("backward"):
        loss.backward()
        over[0] = os.path.exists(os.path.join(os.environ["NVRX_TEST_GATES"], "end"))
        dist.broadcast(over, 0)
client.shutdown_workload_monitoring()
report = straggler.Detector.generate_report()
if report:
    found = report.identify_stragglers()["straggler_sections_relative"]["work"]
    say("report", RANK, *sorted(f"{{one.node}}:{{one.rank}}" for one in found), len(report.rank_to_node))
straggler.Detector.shutdown()
"""
FLAGS = ("--nproc-per-node=4", "--nvrx-compat", "--ft-preload=torch", "--ft-rank-section-timeouts=forward:60")
FLAGS += (f"--ft-straggler-window={WINDOW_S}", "--ft-waiting-sections=backward")


def test_the_rank_that_works_longer_is_named(rig):
    """And no rank that waits for it: not the one with the least work either."""
    first, second = rig.nodes(2, "2", rig.script(SCRIPT), *FLAGS, SLOW="1")
    first.line(rf"slow: rank {SLOW} on node .* longer", 120.0)
    told = CliRunner().invoke(main, ["status", str(rig.run_dir)])
    (rig.dir / "end").touch()
    assert [first.wait(60.0), second.wait(60.0)] == [0, 0]
    # NVRx's own rule refers to the fastest rank: it flags all that have more work than that.
    others = " ".join(f"node{rank // 4}:{rank}" for rank in range(8) if rank != LIGHT)
    assert f"report 0 {others} 8" in first.text + second.text
    (found,) = rig.result["stragglers"]
    assert (found["where"], found["ranks"], len(found["hosts"])) == ("rank", [SLOW], 1)
    assert 0.1 < found["excess"] < 0.5 and told.exit_code == 0


def test_ranks_end_right_after_a_report(rig):
    """A thread of gloo still has its tensors then, and needs the GIL, with which torch waits for that thread."""
    program = str(REPO / "scripts/lib/client_programs/nvrx_straggler.py")
    one = rig.run(program, "--standalone", "--nvrx-compat", "--nproc-per-node=2")
    assert one.wait(60.0) == 0 and "final ['SGD.step', 'fwd'] 1.0" in one.text
