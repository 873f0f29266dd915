"""WGSL: matrix products, attention, sums, quantized weights.

Imports `graph` and `backends.quantization`. Start with `matmul`, the plainest shaders.
"""
