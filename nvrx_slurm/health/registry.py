"""All checks there are. A new family is one more name in FAMILIES, of a module with a tuple CHECKS."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.check import Check, SiteKey

FAMILIES = ("storage", "system", "kernel_log", "gpu", "gpu_processes", "nic", "node_service")


def built_in() -> dict[str, Check]:
    """The checks of this package, by name, in the order of FAMILIES."""
    families = [import_module(f"nvrx_slurm.health.checks.{family}") for family in FAMILIES]
    return {check.name: check for family in families for check in family.CHECKS}


def settings(checks: Iterable[Check]) -> dict[str, SiteKey]:
    """What a site may set under `expect:` for these checks, by name."""
    return {setting.name: setting for check in checks for setting in check.settings}


def defaults(checks: Iterable[Check]) -> dict[str, Any]:
    """The `expected` of a node about which no site said anything."""
    return {name: setting.default for name, setting in settings(checks).items()}


def require_known(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raises UsageError for the first of `names` that is no check, with a suggestion; `where` is "--only" or a file."""
    there = list(known)
    for name in names:
        if name not in there:
            from nvrx_slurm.config.kinds import did_you_mean  # needed for a misspelt name only

            guess = did_you_mean(name, there) or "; `nvrx health list` shows all of them"
            raise UsageError(f"{where}: there is no check {name!r}{guess}")
