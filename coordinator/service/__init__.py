"""The shell: it does what a run decides, and tells the run what came of it.

Imports `run`, `storage`, `members` and `files`. Start with `service`, then `execution`.
"""
