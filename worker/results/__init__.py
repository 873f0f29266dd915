"""Uses of a run's result: merge into its base, export as GGUF, generate text, classify.

Imports `worker.models` and `worker.tasks`. Start with `saved_model`.
"""
