"""A traced graph and its values: shapes, index algebra, operators of our own, passes.

Imports nothing else of `backends.wgpu`. Start with `values`.
"""
