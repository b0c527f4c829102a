"""Fault tolerance for PyTorch training, native to Slurm."""

__version__ = "0.1.0"
