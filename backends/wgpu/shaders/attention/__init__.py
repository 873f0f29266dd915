"""Attention whose scores are never stored: one shader of tiles, its mask, its barriers.

Imports `graph` and modules of `shaders`. Start with `tiles`.
"""
