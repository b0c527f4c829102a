"""PyTorch Lightning callbacks that monitor the ranks of a Trainer, without a change to the model.

    from nvrx_slurm.ptl_resiliency import FaultToleranceCallback

    trainer = Trainer(callbacks=[FaultToleranceCallback(autoresume=True, calculate_timeouts=True)], ...)

Works with `lightning` and `pytorch_lightning`: the one that the script has imported (extra `lightning`). Names and
arguments: nvidia_resiliency_ext.ptl_resiliency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvrx_slurm.ptl_resiliency.fault_tolerance_callback import FaultToleranceCallback
    from nvrx_slurm.ptl_resiliency.fault_tolerance_sections_callback import (
        FaultToleranceSectionsCallback,
    )
    from nvrx_slurm.ptl_resiliency.memory_checkpoint import MemoryCheckpoint
    from nvrx_slurm.ptl_resiliency.simulated_fault import SimulatedFaultParams

__all__ = [
    "FaultToleranceCallback",
    "FaultToleranceSectionsCallback",
    "MemoryCheckpoint",
    "SimulatedFaultParams",
]

_MODULES = {
    "FaultToleranceCallback": "fault_tolerance_callback",
    "FaultToleranceSectionsCallback": "fault_tolerance_sections_callback",
    "MemoryCheckpoint": "memory_checkpoint",
    "SimulatedFaultParams": "simulated_fault",
}


def __getattr__(name: str) -> Any:
    """Import Lightning, which takes seconds, only with a class that needs it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
