"""WGSL: matrix products, attention, sums, quantized weights.

Imports `graph`. Start with `matmul`, which shows what a shader is made of.
"""
