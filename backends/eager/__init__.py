"""The eager backend: torch's own autograd on a `cpu` or `cuda` device.

Imports `backends.base`. Start with `eager`.
"""
