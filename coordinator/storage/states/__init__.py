"""Whole states on disk: checkpoints, which of them stay, and the states of single replicas.

Imports `coordinator.storage.directory`. Start with `checkpoint`; for runs with replicas,
`replica_states`.
"""
