"""What does a worker's work: the connection, the device's thread, files that are fetched.

Imports `worker.logic`, `worker.joining` and `worker.tasks`. Start with `client`, then `engine`.
"""
