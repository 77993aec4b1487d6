"""Benchmarks of this project. `python -m benchmarks` measures the figures in README.md and docs/benchmarks.md."""
