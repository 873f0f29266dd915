"""A worker's I/O and threads: the connection, the device's thread, and the files that it fetches.

Imports `worker.logic`, `worker.join` and `worker.tasks`. Start with `client`, then `engine`.
"""
