"""Afterwards: what a run's files prove, and its report.

Imports `coordinator.run.outputs` and `coordinator.storage`. Start with `audit`.
"""
