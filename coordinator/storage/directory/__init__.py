"""A run's directory: what is where in it, and the journal of what happened.

Imports `coordinator.storage.log`, whose segments are in it. Start with `run_directory`.
"""
