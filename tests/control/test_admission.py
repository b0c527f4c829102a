"""Which connections without a proof may begin: pure, at any number of strangers."""

import pytest

from nvrx_slurm.control.admission import _HANDSHAKES_EACH, HANDSHAKE_TIMEOUT_S, HANDSHAKES, Admission

pytestmark = pytest.mark.fast


def _arrive(admission, address, count, now):
    for number in range(count):
        for gone in admission.arrive(f"{address}/{number}/{now}", address, now):
            admission.leave(gone, False, now)


def test_an_agent_gets_in_at_once_behind_a_thousand_strangers_of_another_address():
    admission = Admission(2048)
    _arrive(admission, "stranger", 1000, 0.0)
    assert len(admission.admit(0.0)) == _HANDSHAKES_EACH
    _arrive(admission, "agent", 1, 0.1)
    assert admission.admit(0.1) == ["agent/0/0.1"]


def test_an_agent_of_the_strangers_own_address_gets_in_within_their_time():
    admission = Admission(2048)
    _arrive(admission, "host", 1000, 0.0)
    admission.admit(0.0)
    _arrive(admission, "host", 1, 0.1)
    assert admission.admit(0.1) == [] and admission.deadline() == 2.0
    for late in admission.late(2.0):
        admission.leave(late, False, 2.0)
    assert admission.admit(2.0) == [] and admission.deadline() == 3.0  # failed ones keep their slots for a second
    assert admission.admit(3.0)[0] == "host/0/0.1"  # the newest first


def test_failures_use_up_places_for_a_second_and_successes_do_not():
    admission = Admission(2048)
    begun = 0
    for step in range(1000):  # a stranger that comes back at once, for 10 s
        now = step / 100
        _arrive(admission, "stranger", 20, now)
        for one in admission.admit(now):
            begun += 1
            admission.leave(one, False, now)
    assert begun <= 11 * _HANDSHAKES_EACH
    admission = Admission(2048)
    _arrive(admission, "agents", 1000, 0.0)
    joined = 0
    while admitted := admission.admit(0.0):
        joined += len(admitted)
        for one in admitted:
            admission.leave(one, True, 0.0)
    assert joined == 1000 and admission.deadline() is None and admission.unproved() == []


def test_connections_are_bounded_in_all_and_in_time():
    admission = Admission(300)
    _arrive(admission, "a", 400, 0.0)
    _arrive(admission, "b", 10, 1.0)
    assert len(admission.unproved()) == 300 and sum(one.startswith("b") for one in admission.unproved()) == 10
    assert "a/399/0.0" in admission.unproved() and "a/0/0.0" not in admission.unproved()  # the oldest made room
    assert len(admission.admit(1.0)) <= HANDSHAKES
    assert len(admission.late(2.5)) == 0 and len(admission.late(HANDSHAKE_TIMEOUT_S)) == 300


def test_without_others_waiting_a_caller_has_the_whole_time():
    admission = Admission(300)
    _arrive(admission, "a", 1, 0.0)
    admission.admit(0.0)
    assert admission.late(HANDSHAKE_TIMEOUT_S - 0.1) == [] and admission.deadline() == HANDSHAKE_TIMEOUT_S
    admission.leave("a/0/0.0", False, 5.0)
    admission.leave("a/0/0.0", False, 5.0)  # twice is harmless
    assert admission.late(99.0) == []
