"""Compare samestep with other tools: run one with `python -m benchmarks.sync`; see README.md."""
