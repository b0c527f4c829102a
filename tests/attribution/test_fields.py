"""Fields that others print, and which node of the job a line means."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.core.attribution.fields import PARSERS, fields_of, have
from nvrx_slurm.core.attribution.named_node import UNNAMED, JobNode, host_of, placed
from nvrx_slurm.core.attribution.verdict import judge
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, FaultKind, RankFault, Remedy

pytestmark = pytest.mark.fast

LINES = {
    "2026-03-01T10:00:00+01:00 n7 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus": {
        "node": "n7", "device": "PCI:0000:3b:00", "code": "79",
    },
    "Mar  1 10:00:00 n7.site kernel: NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0": {
        "node": "n7.site", "device": "PCI:0000:3b:00", "code": "149", "severity": "Fatal",
    },
    "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)": {
        "device": "PCI:0000:3b:00", "code": "154", "action": "Node Reboot Required",
    },
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32": {
        "device": "PCI:0000:05:00.0", "code": "12028", "severity": "Non-fatal",
    },
    "amdgpu 0000:c1:00.0: amdgpu: device lost from bus!": {"device": "0000:c1:00.0"},
    "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***": {
        "what": "STEP", "job": "77.0", "by": "n1", "reason": "TIME LIMIT",
    },
    "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***": {
        "what": "JOB", "job": "77", "by": "n1",
    },
    "srun: error: Node failure on n[07-09,12]": {"node": "n[07-09,12]", "reason": "Node failure"},
    "slurmctld: error: Nodes n7 not responding, setting DOWN": {"node": "n7", "down": "not responding"},
    "slurmctld: Killing JobId=77 on failed node n7": {"node": "n7", "down": "failed node"},
    "srun: error: Node failure on n7": {"node": "n7", "reason": "Node failure"},
    "srun: error: Task launch for StepId=881.0 failed on node n7: no answer": {"job": "881.0", "node": "n7"},
    "n3:1:2 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.7<4791> with status=12 opcode=1": {
        "peer": "10.0.0.7", "code": "12",
    },
    "n3:1:2 [0] NCCL WARN Cuda failure 2 'out of memory'": {"code": "2"},
    "n3:1:2 [0] NCCL WARN HIP failure 719 'unspecified'": {"code": "719"},  # RCCL
    "n3:1:2 [0] NCCL WARN Call to connect to 10.0.0.9<4711> failed": {},
    "Call to ibv_modify_qp failed with error Connection timed out": {"op": "ibv_modify_qp"},
    "n3:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer n7<51>": {"peer": "n7"},
    "EI0006: Getting socket times out.": {"code": "EI0006"},  # HCCL
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, Timeout": {
        "by": "3", "op": "ALLREDUCE",
    },
    "RuntimeError: [Rank 0]: Rank 5 failed to pass monitoredBarrier in 1000 ms": {"by": "0", "peer": "5"},
    "ERROR:megatron.core.rerun_state_machine:Rank 3, node n1, device 3: Possible transient error!!": {
        "rank": "3", "node": "n1", "device": "3",
    },
    "RuntimeError: [pair.cc:538] Connection closed by peer [10.0.0.7]:4711": {"peer": "10.0.0.7"},
    "NET/OFI Request 0x7f0d completed with error. RC: 21. Error: unknown error": {"code": "21"},
    "NVRM: Xid (PCI:0000:3b:00): 45, pid=1, name=python, Ch 01 caused by previous Xid 149": {
        "device": "PCI:0000:3b:00", "code": "149",
    },
    "socketStartConnect: Connect to fe80::96:ae%ib1<17943> failed : Software caused connection abort": {
        "to": "fe80::96:ae%ib1", "unmade": "Software caused connection abort",
    },
    "socketPollConnect: connect to 10.0.0.9<4711> returned No route to host, retrying": {
        "to": "10.0.0.9", "unmade": "No route to host",
    },
    "btl_tcp: connect() to 10.1.2.3:1024 failed: Cannot assign requested address (99)": {
        "to": "10.1.2.3", "unmade": "Cannot assign requested address",
    },
    "connect(fd=52, dest_addr=10.0.0.9:39311) failed: Operation not permitted": {
        "to": "10.0.0.9", "unmade": "Operation not permitted",
    },
    "socketStartConnect: ... failed : Software caused connection abort": {"unmade": "Software caused connection abort"},
    "HTTP Error 429 thrown while requesting GET https://x/y": {"http": "429"},
    "503 Server Error: Service Unavailable for url: https://x/y": {"http": "503"},
    "google.api_core.exceptions.ServiceUnavailable: 503 GET https://x/y": {"http": "503"},
    "server returned HTTP response code: 502 for URL": {"http": "502"},
    "AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28": {
        "s3": "NETWORK_CONNECTION", "op": "GetObject",
    },
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python": {"constraint": "MEMCG"},
    "libc.so.6: version `GLIBC_2.32' not found (required by x.so)": {"code": "GLIBC_2.32"},
    "(raylet) The node with node id: 4b and node name: n7 has been marked dead because": {"node": "n7"},
    "OSError: [Errno 28] No space left on device": {"code": "28"},
}  # fmt: skip


def test_a_list_of_nodes_that_slurm_names_counts():
    line = "srun: error: Node failure on n[07-09]"
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 1, 9, 1)
    fault = replace(fault, finding=examine(fault, line.encode()))
    assert placed(fault, [JobNode("n1"), JobNode("n07")]).finding.node == "n[07-09]"


@pytest.mark.parametrize("line", LINES)
def test_what_others_print_is_read_as_fields(line: str):
    assert fields_of(line) == LINES[line]


def test_each_parser_has_a_line():
    assert not [parser.pattern for parser in PARSERS if not any(map(parser.search, LINES))]


def test_a_number_elsewhere_in_the_line_is_no_field():
    line = "NVRM: Xid (PCI:0000:3b:00): 31, pid=79, name=python, MMU Fault (79)"
    assert have(line, "code=31") and not have(line, "code=79")
    assert have(line, "code=31 action=") and not have(line, "code=31 severity=fatal")


NODES = (
    JobNode("n1", "10.0.0.1", (0, 1)),
    JobNode("n7.site.org", "10.0.0.7", (2, 3)),
    JobNode("N8"),
    JobNode("n12.a.org"),
    JobNode("n12.b.org"),
)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("n1", "n1"),
        ("n1.site.org", "n1"),  # the line has the long name
        ("n7", "n7.site.org"),  # the job has it
        ("n7.site.org", "n7.site.org"),
        ("10.0.0.7", "n7.site.org"),
        ("rank 3", "n7.site.org"),
        ("n8", "N8"),
        ("n70", ""),
        ("n7.other.org", ""),
        ("10.0.0.9", ""),
        ("10", ""),
        ("rank 4", ""),
        ("n12", ""),  # it may be either
        ("", ""),
    ],
)
def test_which_node_a_line_means(name: str, host: str):
    assert host_of(name, NODES) == host


def killed(line: str) -> RankFault:
    """A rank on n1 whose output ends with this line."""
    fault = RankFault(FaultKind.SIGNAL, "n1", 0, 0, 0, 4711, -9, "SIGKILL")
    found = examine(fault, line.encode())
    return RankFault(FaultKind.SIGNAL, "n1", 0, 0, 0, 4711, -9, "SIGKILL", finding=found)


XID = "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus"


@pytest.mark.parametrize(
    ("line", "node", "excludes"),
    [
        (XID.removeprefix("kernel: "), "n1", True),  # its own kernel's
        (f"Mar  1 10:00:00 n1 {XID}", "n1", True),
        (f"Mar  1 10:00:00 n7 {XID}", "n7.site.org", False),  # a log of all nodes
        ("srun: error: Node failure on 10.0.0.7", "n7.site.org", False),
        ("srun: error: Task launch for StepId=8.0 failed on node n7: no answer", "n7.site.org", False),
        ("(raylet) The node with node name: n7 has been marked dead because it is silent", "n7.site.org", False),
    ],
)
def test_the_node_that_is_meant_is_to_blame(line: str, node: str, excludes: bool):
    verdict = judge([placed(killed(line), NODES)], 4)
    assert verdict is not None and verdict.blame is Blame.NODE and f"node {node} " in verdict.sentence
    assert (verdict.remedy is Remedy.ELSEWHERE) == excludes


@pytest.mark.parametrize(
    "line",
    [
        f"Mar  1 10:00:00 n70 {XID}",
        "srun: error: Node failure on node777",
        "srun: error: Task launch for StepId=8.0 failed on node n7.other.org: no answer",
    ],
)
def test_a_node_that_is_not_of_the_job_is_never_to_blame(line: str):
    verdict = judge([placed(killed(line), NODES)], 4)
    assert verdict is not None and verdict.rule == verdict.sentence == ""
    assert verdict.blame is Blame.UNKNOWN and verdict.remedy is Remedy.RESTART


def test_slurm_prints_a_node_failure_on_the_nodes_that_are_left():
    line = "slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO NODE FAILURE, SEE LOG ***"
    fault = placed(killed(line), NODES)
    assert fault.finding is not None and fault.finding.node == UNNAMED
    verdict = judge([fault], 4)
    assert verdict is not None and verdict.rule == "slurm-node-failure" and "n1" not in verdict.sentence
    assert not verdict.alone
