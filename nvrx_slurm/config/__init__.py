"""The configuration: one frozen dataclass tree is the flags, the environment variables, the YAML keys and the docs.

`launch` and `ft` declare the settings; `kinds`, `values` and `rendezvous` read single values; `files` reads YAML;
`layers` merges flags, environment and files. `site` is the file of the health checks. Slurm's prolog reads only that,
so the other modules are loaded at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvrx_slurm.config.ft import FaultToleranceConfig
    from nvrx_slurm.config.launch import LaunchConfig
    from nvrx_slurm.config.layers import SETTINGS, Config, Resolved, resolve
    from nvrx_slurm.config.rendezvous import RendezvousConfig
    from nvrx_slurm.config.settings import Origin, Setting
    from nvrx_slurm.config.values import NodeRange, Std, Streams

__all__ = [
    "SETTINGS",
    "Config",
    "FaultToleranceConfig",
    "LaunchConfig",
    "NodeRange",
    "Origin",
    "RendezvousConfig",
    "Resolved",
    "Setting",
    "Std",
    "Streams",
    "resolve",
]
_MODULES = ("layers", "ft", "launch", "settings", "rendezvous", "values")


def __getattr__(name: str) -> Any:
    """A name of __all__ from the module that has it."""
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
