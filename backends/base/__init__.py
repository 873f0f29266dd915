"""The interface of backends, and what they share: sums along the tree, buffers, draws.

Imports no other chapter of `backends`. Start with `interface`.
"""
