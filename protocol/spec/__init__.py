"""Define a run: its run spec, the manifest derived from it, and the model card of its result.

Imports `protocol.base` and `protocol.spec.sections`. Start with `run_spec`.
"""
