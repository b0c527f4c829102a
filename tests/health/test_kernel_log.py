"""Lines of the driver in the kernel's log, and what they ask for."""

import pytest

from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.checks.kernel_log import XIDS, DriverEvent, Repair, events, judge, parsed, repair

pytestmark = pytest.mark.fast


EXPECTED = {"xid_ignore": (), "xid_fail": ()}
CHANGED = "GPU recovery action changed from"


@pytest.mark.parametrize(
    "line, code, due",
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off", 79, Repair.REBOOT),
        ("NVRM: GPU at 0000:3b:00.0: Xid (PCI:0000:3b:00): 54", 54, Repair.ISOLATE),
        ("nvidia-nvswitch3: SXid (PCI:0000:3b:00): 20034, Fatal, Link 32 LTSSM Fault", 20034, Repair.RESET),
        ("nvidia-nvswitch0: SXid (PCI:0000:3b:00): 12028, Non-fatal, Link 5 egress", 12028, Repair.MONITOR),
        (f"NVRM: Xid (PCI:0000:3b:00): 154, {CHANGED} 0x0 (None) to 0x2 (Node Reboot Required)", 154, Repair.REBOOT),
        (f"NVRM: Xid (PCI:0000:3b:00): 154, {CHANGED} 0x0 (None) to 0x1 (GPU Reset Required)", 154, Repair.RESET),
    ],
)
def test_lines(line, code, due):
    event = parsed(line)
    assert event[:3] == ("SXID" if "SXid" in line else "XID", code, "0000:3b:00")
    assert repair(event) is due


@pytest.mark.parametrize(
    "line",
    [
        "", "NVRM: Xid", "NVRM: Xid (PCI:0000:3b:00): x", "NVRM: MyXid (PCI:0000:3b:00): 79",
        "NVRM: Xid (PCI:../../etc): 79", "Xid (PCI:0000:3b:00): 79", " NVRM: Xid (PCI:0000:3b:00): 79",
        "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/user/Xid (PCI:0000:1b:00): 79, x,task_memcg=/x",
        "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/user/NVRM: Xid (PCI:0000:1b:00): 79, x",
        "python[7]: segfault at 0 in\nNVRM: Xid (PCI:0000:1b:00): 79", "nvidia-nvswitch3: Xid (PCI:0000:3b:00): 79",
    ],
)  # fmt: skip
def test_lines_that_are_none(line):
    assert parsed(line) is None


@pytest.mark.parametrize("priority, there", [(0, True), (4, True), (7, True), (8, False), (12, False), (30, False)])
def test_only_records_of_the_kernel_itself_count(dgx, priority, there):
    """8 and more: of a facility, which is what a process said there (root's, or whose container may)."""
    dgx.write("/dev/kmsg", f"{priority},7,100,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus\n")
    assert [event.code for event in events(NodeView(str(dgx.root)))] == [79] * there


def test_every_code_has_a_meaning_and_the_worst_comes_first():
    assert all(words for _, words in XIDS.values())
    found = [DriverEvent("XID", code, "0000:3b:00", "") for code in (31, 48, 79, 54, 64)]
    verdict, text = judge(found, EXPECTED)
    assert verdict is Verdict.FAIL
    assert text.startswith("XID 54 on 0000:3b:00") and text.endswith("needs a person at the node")
    assert "31" not in text


def test_the_same_event_a_thousand_times_is_one():
    for code, end in ((79, "(GPU has fallen off the bus): needs a reboot"), (31, "(1000 x XID 31)")):
        found = DriverEvent("XID", code, "0000:3b:00", "")
        assert judge([found] * 1000, EXPECTED)[1].endswith(end)
