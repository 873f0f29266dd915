"""Whole states on disk: checkpoints and their retention, and the per-replica states.

Imports `coordinator.storage.directory`. Start with `checkpoint`; for runs with replicas,
`replica_states`.
"""
