"""How a reading of hardware ends if not with a value: there is none, or it failed."""

from __future__ import annotations

from nvrx_slurm.errors import NvrxError


class Absent(Exception):
    """There is nothing to read here (no device, no driver, no library, no such field): says why. Not a failure."""


class HardwareError(NvrxError):
    """Hardware that is there failed, or its driver did not answer in time."""
