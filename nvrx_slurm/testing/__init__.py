"""For tests and trials: a rank monitor without a launcher here, a Slurm cluster on one machine in `minicluster`."""

from nvrx_slurm.testing.standalone import standalone_monitor

__all__ = ["standalone_monitor"]
