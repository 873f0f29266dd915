"""A module's tensors on the device: quantized, in parts; the host releases its copy.

Imports `graph`, `shaders` and `capture`. Start with `quantized_base`.
"""
