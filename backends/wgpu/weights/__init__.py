"""A module's tensors on the device: in few bits, in parts; the host releases its copy.

Imports `graph`, `shaders` and `capture`. Start with `narrow_base`.
"""
