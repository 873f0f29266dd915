"""A run's directory: its layout, and the journal of the run's events.

Imports `coordinator.storage.log`: the directory contains the log's segments. Start with
`run_directory`.
"""
