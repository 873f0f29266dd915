"""What a run keeps on disk: gradient log, checkpoints, journal, and how a restart finds them.

Imports `coordinator.disk` and the records of `coordinator.run`. Start with `run_directory`.
"""
