"""The gradient log: averages and commits in segments, its index, and steps taken again from it.

Imports `coordinator.disk` and the records of `coordinator.run.outputs`. Start with `gradient_log`.
"""
