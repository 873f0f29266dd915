"""Read text and samples from files, check them and remove duplicates; without torch.

The coordinator reads the data to find mistakes before any worker does, a worker to train on it.
Imports `protocol.base` and `protocol.spec`. Start with `labeled_text`.
"""
