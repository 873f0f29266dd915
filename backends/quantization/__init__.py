"""Quantized frozen weights: their formats, and quantizing a module's base while it is read."""
