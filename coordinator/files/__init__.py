"""The files that workers fetch: found, hashed and served.

Imports `coordinator.disk`. Start with `blob_index`.
"""
