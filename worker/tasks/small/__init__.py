"""Tasks without a transformer, for tests, benchmarks and first steps."""
