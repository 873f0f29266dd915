"""How gradients of a step become averages: the tree, sums along it, chunks, codecs, rounding.

Pure arithmetic on float32 arrays. Imports `protocol.base` and `protocol.spec`. Start with `tree`,
then `tree_sum` and `reducer`.
"""
