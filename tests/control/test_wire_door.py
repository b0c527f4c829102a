"""Which connections without a proof may begin: pure, at any number of strangers."""

from __future__ import annotations

from nvrx_slurm.control.door import _PLACES_EACH, HANDSHAKE_TIMEOUT_S, PLACES, Door


def _arrive(door: Door[str], address: str, count: int, now: float) -> None:
    for number in range(count):
        for gone in door.arrive(f"{address}/{number}/{now}", address, now):
            door.leave(gone, False, now)


def test_an_agent_gets_in_at_once_behind_a_thousand_strangers_of_another_address() -> None:
    door: Door[str] = Door(2048)
    _arrive(door, "stranger", 1000, 0.0)
    assert len(door.admit(0.0)) == _PLACES_EACH
    _arrive(door, "agent", 1, 0.1)
    assert door.admit(0.1) == ["agent/0/0.1"]


def test_an_agent_of_the_strangers_own_address_gets_in_within_their_patience() -> None:
    door: Door[str] = Door(2048)
    _arrive(door, "host", 1000, 0.0)
    door.admit(0.0)
    _arrive(door, "host", 1, 0.1)
    assert door.admit(0.1) == [] and door.deadline() == 2.0
    for late in door.late(2.0):
        door.leave(late, False, 2.0)
    assert door.admit(2.0) == [] and door.deadline() == 3.0  # failed handshakes keep their places for a second
    assert door.admit(3.0)[0] == "host/0/0.1"  # the newest first


def test_failures_use_up_places_for_a_second_and_successes_do_not() -> None:
    door: Door[str] = Door(2048)
    begun = 0
    for step in range(1000):  # a stranger that comes back at once, for 10 s
        now = step / 100
        _arrive(door, "stranger", 20, now)
        for guest in door.admit(now):
            begun += 1
            door.leave(guest, False, now)
    assert begun <= 11 * _PLACES_EACH
    door = Door(2048)
    _arrive(door, "agents", 1000, 0.0)
    joined = 0
    while admitted := door.admit(0.0):
        joined += len(admitted)
        for guest in admitted:
            door.leave(guest, True, 0.0)
    assert joined == 1000 and door.deadline() is None and door.guests() == []


def test_connections_are_bounded_in_all_and_in_time() -> None:
    door: Door[str] = Door(300)
    _arrive(door, "a", 400, 0.0)
    _arrive(door, "b", 10, 1.0)
    assert len(door.guests()) == 300 and sum(guest.startswith("b") for guest in door.guests()) == 10
    assert "a/399/0.0" in door.guests() and "a/0/0.0" not in door.guests()  # the oldest made room
    assert len(door.admit(1.0)) <= PLACES
    assert len(door.late(2.5)) == 0 and len(door.late(HANDSHAKE_TIMEOUT_S)) == 300


def test_without_others_waiting_a_guest_has_the_whole_time() -> None:
    door: Door[str] = Door(300)
    _arrive(door, "a", 1, 0.0)
    door.admit(0.0)
    assert door.late(HANDSHAKE_TIMEOUT_S - 0.1) == [] and door.deadline() == HANDSHAKE_TIMEOUT_S
    door.leave("a/0/0.0", False, 5.0)
    door.leave("a/0/0.0", False, 5.0)  # twice is harmless
    assert door.late(99.0) == []
