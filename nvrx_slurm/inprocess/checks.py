"""Checks of users' numbers, times and environment variables, with the same messages everywhere."""

from __future__ import annotations

import os
from datetime import timedelta

from nvrx_slurm.errors import UsageError


def variable(name: str) -> str:
    """The environment variable; raises UsageError if it is missing or empty."""
    value = os.environ.get(name)
    if not value:
        raise UsageError(
            f"{name} is not set; start the ranks with nvrx-run (or torchrun), or set it yourself"
        )
    return value


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
