"""The configuration: one frozen dataclass tree is the flags, the environment variables, the YAML keys and the docs.

`launch` and `ft` declare the settings, `values` reads single values, `files` reads YAML, `resolve` merges the layers.
"""

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.resolve import SETTINGS, Config, Resolved, resolve
from nvrx_slurm.config.settings import Origin, Setting
from nvrx_slurm.config.values import NodeRange, RendezvousConfig, Std, Streams

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
