"""The device: adapters, memory, submissions, tuning, node sums in its memory.

Imports `graph`, `shaders`, `capture`, `weights` and `lowering`. Start with `device`.
"""
