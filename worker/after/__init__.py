"""What a run's result is used for: merged into its base, written as GGUF, asked, applied to a file.

Imports `worker.models` and `worker.tasks`. Start with `finished`.
"""
