"""A run's directory: its layout, and the journal of what happened.

Imports `coordinator.storage.log`, whose segments are in it. Start with `run_directory`.
"""
