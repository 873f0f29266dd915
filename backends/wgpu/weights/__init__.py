"""A module's tensors as the device keeps them: in few bits, in parts; the host lets go of its own.

Imports `graph`, `shaders` and `capture`. Start with `narrow_base`.
"""
