"""Text and samples as they are read from files: checked, without duplicates, without torch.

The coordinator reads them to find mistakes before any worker is asked, a worker to train on them.
Imports `protocol.base` and `protocol.spec`. Start with `labeled_text`.
"""
