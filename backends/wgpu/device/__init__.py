"""The device: adapters, memory, submissions, tuning, subtree sums in its memory.

Imports `graph`, `shaders`, `capture`, `weights` and `lowering`. Start with `device`.
"""
