"""WGSL: matrix products, attention, sums, weights in fewer bits.

Imports `graph`. Start with `matmul`.
"""
