"""Merged logs of whole jobs: real launchers, their shippers and aggregators, killed, stopped and elected."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import grpc
import pytest
from agent_harness import QUICK, UP, kill, up
from log_harness import by_source, foreign_client
from stage import free_port
from waits import until

from nvrx_slurm.core.logs.names import index_file

pytestmark = pytest.mark.process


CHATTY = UP + 'for i in range(300):\n    say("line", i)\n    print("error", i, file=sys.stderr)\n'
UNTIL_TOLD = CHATTY + 'gate(f"end{CYCLE}")\nsay("last", RANK)\n'


def flags(rig, *more):
    return (f"--ft-per-cycle-applog-prefix={rig.dir}/merged/train.log", "--redirects=2", *more)


def merged(rig, cycle):
    return rig.dir / "merged" / f"train_cycle{cycle}.log"


def log_program(one, module):
    """The shipper or aggregator of this agent."""
    for pid in one.children:
        with contextlib.suppress(OSError):  # it has ended
            if f"logs.{module}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def terms(rig, cycle):
    """Those of the aggregators that wrote the file."""
    lines = map(json.loads, Path(index_file(str(merged(rig, cycle)))).read_text().splitlines())
    return [line["term"] for line in lines if isinstance(line, dict) and "term" in line]


def check(rig, cycle):
    """Each file of each rank is in the merged file exactly once; how many there are."""
    path = merged(rig, cycle)
    found = by_source(path.read_bytes(), Path(index_file(str(path))).read_bytes())
    written = {
        str(path.relative_to(rig.logs)): path.read_bytes() for path in rig.run_dir.glob(f"cycle_{cycle}/*/*_*.*")
    }
    assert found == {name: data for name, data in written.items() if data}
    return len(found)


def holds_token(pid):
    with contextlib.suppress(OSError):  # it has ended
        return b"5" * 64 in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def test_no_process_of_a_job_has_its_token_in_the_environment(rig):
    one = rig.run(rig.script(UNTIL_TOLD), *flags(rig), NVRX_TOKEN="5" * 64)
    up(one, 0)
    until(lambda: all(log_program(one, name) for name in ("shipper", "aggregator")), "both programs run")
    assert len(one.children) >= 4
    until(lambda: not any(holds_token(pid) for pid in one.children), "no process has it, once it is executed")
    rig.ends_well("end0", one)


def test_each_cycle_of_a_job_has_one_file_and_the_launcher_too(rig):
    look = """
        if RANK == 1:
            link = os.environ["NVRX_CURRENT_CYCLE_INFO"]
            while not os.path.exists(link) or json.load(open(link))["cycle_number"] != CYCLE:
                time.sleep(0.001)
            seen = json.load(open("seen")) if CYCLE else []
            json.dump([*seen, os.readlink(link).rpartition(".")[2]], open("seen", "w"))
            sys.exit(7 if CYCLE == 0 else 0)
    """
    script = rig.script(CHATTY + textwrap.dedent(look))
    more = flags(
        rig,
        "--ft-cycle-info-dir=info",
        f"--ft-nvrx-logfile={rig.dir}/merged/%j/nvrx.log",
        "--nproc-per-node=2",
        "--max-restarts=1",
    )
    rig.ran(script, "--standalone", *more)
    assert [check(rig, cycle) for cycle in range(2)] == [4, 4]
    assert merged(rig, 1).read_text().count("0: line ") == 300
    said = (rig.dir / "merged" / rig.run_dir.parent.name / "nvrx.log").read_text()
    assert json.loads((rig.dir / "seen").read_text()) == ["0", "1"]
    info = [json.loads(path.read_text()) for path in sorted((rig.dir / "info").glob("cycle_info.*.0.[01]"))]
    assert [one["cycle_log_file"] for one in info] == [str(merged(rig, 0)), str(merged(rig, 1))]
    first = info[0]
    assert (first["active_ranks"], first["standby_nodes"], first["generation"]) == ("0-1", "", "1")
    assert first["active_nodes"] and first["cycle_start_time"] < first["cycle_end_time"] < info[1]["cycle_end_time"]
    assert "exited with code 7" in said and "job ends with code 0" in said and "] up " not in said


def test_programs_that_are_killed_lose_nothing_and_nvrx_logs_follows_a_job_to_its_end(rig):
    one = rig.run(rig.script(UNTIL_TOLD), "--standalone", *flags(rig, "--nproc-per-node=2"))
    up(one, 0)
    until(lambda: (rig.run_dir / "merged" / "cycle_0.log").exists(), "the merged file can be found from the run")
    follow = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "logs", "--follow", str(rig.run_dir)]
    told = (rig.dir / "told").open("w+")
    with told, subprocess.Popen(follow, env=rig.env(), stdout=subprocess.PIPE, stderr=told, text=True) as reader:
        first = reader.stdout.readline()
        for module in ("shipper", "aggregator", "shipper"):
            until(lambda m=module: log_program(one, m), f"the {module} runs")
            old = log_program(one, module)
            os.kill(old, signal.SIGKILL)
            until(lambda m=module, o=old: log_program(one, m) not in (0, o), f"another {module} runs")
        rig.open("end0")
        rest = reader.stdout.read()
    assert one.wait() == 0 and reader.returncode == 0
    assert check(rig, 0) == 4 and one.text.count("it is started again") == 3
    assert first + rest == merged(rig, 0).read_text()
    said = (rig.dir / "told").read_text()
    assert said.count("nvrx-run: cycle 0: ") == 1 and said.endswith("ended with code 0: all ranks finished\n")


def test_a_new_coordinator_goes_on_with_the_same_files(rig):
    """The first node is killed: the aggregator of the next term takes the file of the cycle, and the next cycle's."""
    script = rig.script(UNTIL_TOLD)
    more = flags(rig, "--max-restarts=3", *QUICK)
    first, second, third = rig.nodes(3, "2:3", script, *more)
    third.line("this node is a hot spare")
    until(lambda: merged(rig, 0).exists() and b"line 299" in merged(rig, 0).read_bytes(), "lines are merged")
    assert log_program(second, "aggregator") == 0
    kill(first, up(first, 0)[1])
    assert {up(second, 1)[0], up(third, 1)[0]} == {0, 1}
    rig.ends_well("end1", second, third)
    assert check(rig, 1) == 4
    assert terms(rig, 1)[-1] >= 2 and terms(rig, 0)[0] == 1


def test_programs_that_are_stopped_delay_the_end_only_as_long_as_was_asked_for(rig):
    script = rig.script(UNTIL_TOLD)
    one = rig.run(script, "--standalone", *flags(rig, "--ft-log-server-graceful-shutdown-timeout=0.5"))
    up(one, 0)
    until(lambda: merged(rig, 0).exists(), "the programs run")
    for module in ("shipper", "aggregator"):
        os.kill(log_program(one, module), signal.SIGSTOP)
    rig.open("end0")
    assert one.wait(15.0) == 0 and rig.result["code"] == 0


def test_a_restart_does_not_wait_for_the_logs(rig):
    """Neither the shipper nor the aggregator ever reads; ranks restart as ever."""
    script = rig.script(CHATTY + "if CYCLE < 3:\n    sys.exit(1)\n")
    more = flags(rig, "--max-restarts=3", "--ft-crash-loop-window=0", "--ft-log-server-graceful-shutdown-timeout=0.2")
    sleeps = "[sys.executable, '-c', 'import time; time.sleep(1000)']"
    rig.before = f"""
from nvrx_slurm.child import bootstrap
real = bootstrap.command
bootstrap.command = lambda module, *args, **how: {sleeps} if ".logs." in module else real(module, *args, **how)
"""
    rig.ran(script, "--standalone", *more)
    assert all(restart["down_s"] < 1.0 for restart in rig.result["restarts"]) and len(rig.result["restarts"]) == 3


def test_a_second_job_with_the_same_prefix_appends_and_is_told_how_to_keep_them_apart(rig):
    script = rig.script(CHATTY)
    first = rig.run(script, "--standalone", "--rdzv-id=one", *flags(rig))
    assert first.wait() == 0 and "%j" not in first.text
    size = merged(rig, 0).stat().st_size
    second = rig.run(script, "--standalone", "--rdzv-id=two", *flags(rig))
    assert second.wait() == 0 and "%j" in second.text and str(merged(rig, 0)) in second.text
    assert merged(rig, 0).stat().st_size == 2 * size


def test_foreign_clients_of_nvrxs_log_service_are_served_where_that_is_asked_for(rig):
    port = free_port()
    one = rig.run(rig.script(UNTIL_TOLD), "--standalone", *flags(rig, f"--ft-log-server-grpc-port={port}"))
    up(one, 0)
    until(lambda: merged(rig, 0).exists(), "the aggregator runs")
    foreign = rig.dir / "merged" / "foreign.log"
    assert foreign_client(f"127.0.0.1:{port}", [(str(foreign), b"theirs\n")]) == 7
    for path in (merged(rig, 0), rig.dir / "elsewhere.log"):
        with pytest.raises(grpc.RpcError):
            foreign_client(f"127.0.0.1:{port}", [(str(path), b"evil\n")])
    rig.ends_well("end0", one)
    assert foreign.read_bytes() == b"theirs\n"
    assert check(rig, 0) == 2 and not (rig.dir / "elsewhere.log").exists()


@pytest.mark.parametrize("module", ["shipper", "aggregator", ""])
def test_a_program_that_waits_for_its_next_start_at_the_end_gets_it(rig, module):
    """Where none can run, the number of lines that are not merged is said."""
    rig.before = "from nvrx_slurm.child import bootstrap, supervised\nsupervised.SupervisedProcess.first_delay_s = 30\n"
    if not module:
        rig.before += "bootstrap.command = lambda module, *args, **how: ['/bin/false']"
    one = rig.run(rig.script(UNTIL_TOLD), "--standalone", *flags(rig, "--ft-node-health-checks=false"))
    up(one, 0)
    old = 0
    for _ in range(2 if module else 0):  # the second time it waits
        until(lambda: log_program(one, module) not in (0, old), "it runs")
        os.kill(old := log_program(one, module), signal.SIGKILL)
    until(lambda: not log_program(one, module or "shipper"), "it does not run")
    rig.ends_well("end0", one)
    assert ("602 lines are not in the merged logs" in one.text) != bool(module)
    assert not module or check(rig, 0) == 2
