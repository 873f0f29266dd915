"""Files that a run spec names: find them, digest them, list them for workers.

Imports `protocol.base` and `protocol.spec`. Start with `run_files`.
"""
