"""Checks of users' numbers and times, with the same messages everywhere."""

from __future__ import annotations

from datetime import timedelta


def check_time(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Raises TypeError unless it is a timedelta, ValueError unless it is above 0 s (or 0 s, if `may_be_zero`)."""
    if not isinstance(value, timedelta):
        raise TypeError(f"{name} must be a datetime.timedelta, not {value!r}")
    if value < timedelta(0) or (not value and not may_be_zero):
        raise ValueError(f"{name} must be longer than 0 s, not {value}")


def check_whole(name: str, value: object, least: int) -> None:
    """Raises TypeError unless it is an int and not a bool, ValueError unless it is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
