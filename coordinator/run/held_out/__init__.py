"""Evaluation of the held-out parts: by whom, and whether its figures stop the run. Pure.

Imports `coordinator.run.outputs` and `coordinator.run.workers`. Start with `evaluation`.
"""
