"""From a graph to a plan: which values get a buffer, and the kernels that fill them.

Imports `graph`, `shaders`, `capture` and `weights`. Start with `lowering`.
"""
