"""The audit of a run's files, and the report of a run.

Imports `coordinator.run.outputs` and `coordinator.storage`. Start with `audit`.
"""
