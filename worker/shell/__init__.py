"""A worker's I/O and threads: the connection, the device's thread, and fetched files.

Imports `worker.logic`, `worker.join` and `worker.tasks`. Start with `client`, then `engine`.
"""
