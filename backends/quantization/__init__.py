"""Frozen weights in fewer bits: the formats, and how a module's base is narrowed as it is read."""
