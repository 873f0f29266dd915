"""WGSL: matrix products, attention, sums, weights in fewer bits.

Imports `graph`. Start with `matmul`, which shows what a shader is made of.
"""
