"""Captured logits of a teacher on disk: each step's rows at once, files in the end.

Imports `coordinator.disk` and `protocol.datasets`. Start with `captured_files`.
"""
