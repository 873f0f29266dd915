"""The shell: execute what a run decides, and return the results to it.

Imports `run`, `storage`, `members` and `files`. Start with `service`, then `execution`.
"""
