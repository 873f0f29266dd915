"""What a device must offer, and what all devices share: sums along the tree, narrow weights.

Imports nothing else of `backends`. Start with `interface`.
"""
