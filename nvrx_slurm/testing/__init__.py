"""For tests and trials of training scripts: a rank monitor without a launcher, injected faults."""

from nvrx_slurm.testing.standalone import standalone_monitor

__all__ = ["standalone_monitor"]
