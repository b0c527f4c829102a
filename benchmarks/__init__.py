"""Figures of nvrx-run beside torchrun on one machine; `scripts/bench`. docs/benchmarks.md says how each is measured."""
