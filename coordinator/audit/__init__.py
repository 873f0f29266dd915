"""Afterwards: what a run's files prove, and its report.

Imports `run` and `storage`. Start with `audit`.
"""
