"""How fast it is, against other ways: run one with `python -m benchmarks.sync`; see README.md."""
