"""The files that workers fetch: their permission, index and server.

Imports `coordinator.disk`. Start with `blob_index`.
"""
