"""Attention without its scores in memory: one shader of tiles, its mask, its barriers.

Imports what is beside it in `shaders`, and `graph`. Start with `tiles`.
"""
