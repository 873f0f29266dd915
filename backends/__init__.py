"""Backends: the interface of a device, its implementations, and the registry that chooses one.

Start with `base.interface`, then `eager`.
"""
