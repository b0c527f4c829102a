"""The grammar of reasons, and which nodes may be drained and taken back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.health.check import Finding, Verdict
from nvrx_slurm.health.hooks import drains as drain
from nvrx_slurm.slurm.api import text as slurm_text
from nvrx_slurm.slurm.api.cli import CommandLine
from nvrx_slurm.slurm.api.facts import NodeFacts, SlurmError
from nvrx_slurm.slurm.api.tools import Tools, find


def parse_note(line: str) -> NodeFacts:
    return slurm_text.nodes(line)["n1"]


NAMES = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+){0,3}", fullmatch=True)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(NAMES, st.text(max_size=150)), min_size=1, max_size=8))
def test_any_reason_survives_slurm(failed: list[tuple[str, str]]) -> None:
    """What scontrol shows of it, with the user behind it, is read as what was meant."""
    text = drain.reason(Finding(check, Verdict.FAIL, said) for check, said in failed)
    assert text.isascii() and text.isprintable() and not set(text) & set('=[]"`$\\|&')
    line = f"NodeName=n1 State=IDLE+DRAIN CPUAlloc=0 Reason={text} [root@2026-11-21T12:00:00] Comment=none"
    assert slurm_text.fields(line)["Comment"] == "none"
    note = parse_note(line)
    assert note.states == {"IDLE", "DRAIN"} and note.reason_by == "root"
    why = drain.ours(note)
    assert why is not None and why.checks == tuple(dict.fromkeys(check for check, _ in failed))
    assert len(why.text) <= drain.MAX_TEXT


@pytest.mark.parametrize(
    "text", ["", "nvrx", "nvrx:", "nvrx::x", "nvrx:a", "NVRX:a:b", "nvrx:A:b", "x nvrx:a:b", "nvrx:a,:b", "nvrx:a b:c"]
)
def test_what_is_no_reason_of_ours(text: str) -> None:
    assert drain.parse(text) is None


@pytest.mark.parametrize(
    ("states", "may"),
    [
        ("IDLE", True), ("MIXED", True), ("ALLOCATED", True), ("IDLE+RESERVED", True), ("ALLOCATED+COMPLETING", True),
        ("IDLE+DRAIN", False), ("MIXED+DRAIN", False), ("DOWN", False), ("DOWN*", False), ("IDLE*", False),
        ("IDLE+FAIL", False), ("IDLE+MAINT", False), ("DOWN+DRAIN", False), ("IDLE+CLOUD", True),
        ("IDLE+MAINTENANCE", False), ("MIXED+REBOOT_REQUESTED", False), ("IDLE+REBOOT_ISSUED", False),
        ("IDLE+MAINTENANCE+RESERVED", False), ("IDLE+REBOOT^", False), ("IDLE+REBOOT@", False), ("IDLE@", False),
        ("IDLE^", False), ("IDLE$", False), ("IDLE+CLOUD+POWERING_DOWN", False), ("IDLE+CLOUD+POWER_DOWN", False),
    ],
)  # fmt: skip
def test_nobodys_drain_is_written_over(states: str, may: bool) -> None:
    assert drain.may_drain(parse_note(f"NodeName=n1 State={states} Reason=Not responding")) == may


OURS = "nvrx:lustre:/sys/fs/lustre/health_check says 'NOT HEALTHY'"


@pytest.mark.parametrize(
    ("states", "reason", "who", "ours"),
    [
        ("IDLE+DRAIN", OURS, "root", True), ("IDLE+CLOUD+DRAIN", OURS, "root", True),
        ("MIXED+DRAIN+DYNAMIC_NORM", OURS, "root", True), ("IDLE+DRAIN+PLANNED", OURS, "root", True),
        ("IDLE+DRAIN", OURS, "alice", False), ("IDLE+DRAIN", f"see {OURS}", "root", False),
        ("IDLE+DRAIN", OURS.upper(), "root", False), ("IDLE+DRAIN", "", "root", False), ("IDLE", OURS, "root", False),
        ("DOWN+DRAIN", OURS, "root", False), ("DOWN*+DRAIN", OURS, "root", False), ("IDLE+FAIL", OURS, "root", False),
        ("IDLE+DRAIN+MAINT", OURS, "root", False), ("IDLE*+DRAIN", OURS, "root", False),
        ("IDLE+DRAIN+REBOOT_ISSUED", OURS, "root", False), ("IDLE+DRAIN+REBOOT@", OURS, "root", False),
        ("IDLE+DRAIN+POWERED_DOWN", OURS, "root", False), ("IDLE+DRAIN+MAINTENANCE", OURS, "root", False),
    ],
)  # fmt: skip
def test_only_a_drain_that_is_plainly_ours_may_be_taken_back(states: str, reason: str, who: str, ours: bool) -> None:
    line = f"NodeName=n1 State={states} ThreadsPerCore=1 Reason={reason} [{who}@2026-11-21T12:00:00]"
    assert (drain.ours(parse_note(line)) is not None) == ours


def test_unknown_and_not_applicable_are_no_recovery() -> None:
    both = ("a", "b")
    passed = [Finding("a", Verdict.PASS, ""), Finding("b", Verdict.PASS, "")]
    assert drain.recovered(both, passed)
    for verdict in (Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.FAIL):
        assert not drain.recovered(both, [passed[0], Finding("b", verdict, "")])
    assert not drain.recovered(both, passed[:1])


@pytest.mark.parametrize("name", ["", "n1,n2", "n[1-2]", "ALL", "all", "n1\n", "--help", "n 1", "n1;x"])
def test_only_one_node_is_ever_named(name: str) -> None:
    with pytest.raises(SlurmError, match="is not the name of a node"):
        CommandLine(Tools(trusted="/bin/echo")).drain(name, "x")


def note(path: Path, body: str = "", within_s: float = 60.0) -> NodeFacts:
    """What `scontrol show node n1` says, of a scontrol of this body, as hooks ask."""
    if body:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return CommandLine(Tools(trusted=str(path), until_s=time.monotonic() + within_s)).nodes(["n1"])["n1"]


@pytest.mark.parametrize(
    ("body", "within_s", "said"),
    [
        ("echo NodeName=n1 State=IDLE; exec sleep 600", 0.5, "did not end"),
        ("exec cat /dev/zero", 0.5, "did not end"),
        ("head -c 2000000 /dev/zero", 60.0, "1048576 bytes"),
        ("echo no access >&2; exit 1", 60.0, "no access"),
        ("head -c 2000000 /dev/zero >&2; exit 3", 60.0, "failed"),
        ("echo NodeName=n1", 60.0, "State"),
        ("echo NodeName=n2 State=IDLE", 60.0, "n1"),
        ("echo slurm_load_node error", 60.0, "n1"),
    ],
)
def test_scontrol_that_does_not_work(tmp_path: Path, body: str, within_s: float, said: str) -> None:
    with pytest.raises(SlurmError, match=said):
        note(tmp_path / "scontrol", body, within_s)


def test_scontrol_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlurmError, match="cannot be run"):
        note(tmp_path / "none")
    with pytest.raises(SlurmError, match="cannot be run"):
        note(tmp_path)
    monkeypatch.setattr("nvrx_slurm.slurm.api.tools.PLACES", (str(tmp_path / "none"),))
    with pytest.raises(SlurmError, match="set SCONTROL"):
        find()


def test_what_scontrol_warns_of_is_no_part_of_its_answer(tmp_path: Path) -> None:
    """And without SLURM_TIME_FORMAT, in the language of machines."""
    line = "NodeName=n1 State=IDLE Reason=$LC_ALL-$SLURM_TIME_FORMAT"
    found = note(tmp_path / "scontrol", f'echo a warning >&2; echo "{line}"')
    assert (found.states, found.reason) == ({"IDLE"}, "C-")
