"""What a capture of a teacher's logits keeps on disk: each step's rows at once, files in the end.

Imports `coordinator.disk` and `protocol.data`. Start with `captured_files`.
"""
