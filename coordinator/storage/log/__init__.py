"""The gradient log: averages and commits in segments, their index, and replay of logged steps.

Imports `coordinator.disk` and the records of `coordinator.run.outputs`. Start with `gradient_log`.
"""
