"""The eager backend: torch's own autograd on any device that torch supports.

Imports `base`, `losses`, `quantization` and `checks` of `backends`. Start with `eager`.
"""
