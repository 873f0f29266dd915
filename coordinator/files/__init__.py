"""What workers fetch: the files that a run names, found, hashed and served.

Imports `coordinator.disk`. Start with `blob_index`.
"""
