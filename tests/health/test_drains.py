"""The grammar of reasons, and which nodes may be drained and taken back."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.health.check import CheckFinding, Verdict
from nvrx_slurm.health.hooks import drains as drain
from nvrx_slurm.slurm.api import text as slurm_text
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.api.tools import Tools, find

pytestmark = pytest.mark.fast


def parse_note(line):
    return slurm_text.nodes(line)["n1"]


NAMES = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+){0,3}", fullmatch=True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(NAMES, st.text(max_size=150)), min_size=1, max_size=8))
def test_any_reason_survives_slurm(failed):
    """What scontrol shows of it, with the user behind it, is read as what was meant."""
    text = drain.reason(CheckFinding(check, Verdict.FAIL, said) for check, said in failed)
    assert text.isascii() and text.isprintable() and not set(text) & set('=[]"`$\\|&')
    line = f"NodeName=n1 State=IDLE+DRAIN CPUAlloc=0 Reason={text} [root@2026-11-21T12:00:00] Comment=none"
    note = parse_note(line)
    assert note.states == {"IDLE", "DRAIN"} and note.reason_by == "root"
    why = drain.ours(note)
    assert why.checks == tuple(dict.fromkeys(check for check, _ in failed))
    assert len(why.text) <= drain.MAX_TEXT


def test_what_is_no_reason_of_ours():
    texts = ("", "nvrx", "nvrx::x", "nvrx:a", "NVRX:a:b", "nvrx:A:b", "x nvrx:a:b", "nvrx:a,:b", "nvrx:a b:c")
    assert [text for text in texts if drain.parse(text)] == []


IN_SERVICE = ("IDLE", "MIXED", "ALLOCATED+COMPLETING", "IDLE+RESERVED", "IDLE+CLOUD")
OUT = (
    "IDLE+DRAIN", "MIXED+DRAIN", "DOWN", "DOWN*", "IDLE*", "IDLE+FAIL", "IDLE+MAINT", "IDLE+MAINTENANCE",
    "MIXED+REBOOT_REQUESTED", "IDLE+REBOOT^", "IDLE+REBOOT@", "IDLE@", "IDLE^", "IDLE$", "IDLE+CLOUD+POWERING_DOWN",
)  # fmt: skip


def test_nobodys_drain_is_written_over():
    notes = {states: parse_note(f"NodeName=n1 State={states} Reason=Not responding") for states in (*IN_SERVICE, *OUT)}
    assert tuple(states for states, note in notes.items() if drain.may_drain(note)) == IN_SERVICE


OURS = "nvrx:lustre:/sys/fs/lustre/health_check says 'NOT HEALTHY'"


def test_only_a_drain_that_is_plainly_ours_may_be_taken_back():
    plain = [(states, OURS, "root") for states in ("IDLE+DRAIN", "IDLE+CLOUD+DRAIN", "MIXED+DRAIN+DYNAMIC_NORM")]
    others = ("IDLE", "DOWN*+DRAIN", "IDLE+DRAIN+MAINT", "IDLE*+DRAIN", "IDLE+DRAIN+REBOOT@", "IDLE+DRAIN+POWERED_DOWN")
    rows = [*plain, *((states, OURS, "root") for states in others)]
    rows += [("IDLE+DRAIN", text, who) for text, who in ((OURS, "alice"), (f"see {OURS}", "root"), ("", "root"))]
    line = "NodeName=n1 State={} ThreadsPerCore=1 Reason={} [{}@2026-11-21T12:00:00]"
    assert [row for row in rows if drain.ours(parse_note(line.format(*row)))] == plain


def test_unknown_and_not_applicable_are_no_recovery():
    both = ("a", "b")
    passed = [CheckFinding("a", Verdict.PASS, ""), CheckFinding("b", Verdict.PASS, "")]
    assert drain.recovered(both, passed)
    for verdict in (Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.FAIL):
        assert not drain.recovered(both, [passed[0], CheckFinding("b", verdict, "")])
    assert not drain.recovered(both, passed[:1])


def test_only_one_node_is_ever_named():
    for name in ("", "n1,n2", "n[1-2]", "ALL", "all", "n1\n", "--help", "n 1", "n1;x"):
        with pytest.raises(SlurmError, match="is not the name of a node"):
            Slurm(Tools(trusted="/bin/echo")).update_node(name, "State=DRAIN")


def note(path, body="", within_s=60.0):
    """What `scontrol show node n1` says, of a scontrol of this body, as hooks ask."""
    if body:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return Slurm(Tools(trusted=str(path), until_s=time.monotonic() + within_s)).nodes(["n1"])["n1"]


@pytest.mark.parametrize(
    "body, within_s, said",
    [
        ("echo NodeName=n1 State=IDLE; exec sleep 600", 0.5, "did not end"),
        ("head -c 70000000 /dev/zero", 60.0, "67108864 bytes"),
        ("echo no access >&2; exit 1", 60.0, "no access"),
        ("echo NodeName=n1", 60.0, "State"),
        ("echo NodeName=n2 State=IDLE", 60.0, "n1"),
    ],
)
def test_scontrol_that_does_not_work(tmp_path, body, within_s, said):
    with pytest.raises(SlurmError, match=said):
        note(tmp_path / "scontrol", body, within_s)


def test_scontrol_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(SlurmError, match="cannot be run"):
        note(tmp_path / "none")
    monkeypatch.setattr("nvrx_slurm.slurm.api.tools.PLACES", (str(tmp_path / "none"),))
    with pytest.raises(SlurmError, match="set SCONTROL"):
        find()


def test_what_scontrol_warns_of_is_no_part_of_its_answer(tmp_path):
    """And without SLURM_TIME_FORMAT, in the language of machines."""
    line = "NodeName=n1 State=IDLE Reason=$LC_ALL-$SLURM_TIME_FORMAT"
    found = note(tmp_path / "scontrol", f'echo a warning >&2; echo "{line}"')
    assert (found.states, found.reason) == ({"IDLE"}, "C-")
