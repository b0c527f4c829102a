"""Figures of nvrx-run beside torchrun on one machine; `scripts/bench`, docs/reference/benchmarks.md."""
