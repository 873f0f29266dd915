"""Captured logits of a teacher on disk: rows are stored with each step, then written as files.

Imports `coordinator.disk` and `protocol.datasets`. Start with `captured_files`.
"""
