"""Quantized frozen weights: the formats, and how a module's base is quantized as it is read."""
