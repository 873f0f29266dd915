"""The interface of backends, and what they share: sums along the tree, narrow weights, checks.

Imports no other chapter of `backends`. Start with `interface`.
"""
