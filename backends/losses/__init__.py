"""Losses that a backend computes in parts: over a large vocabulary, or over a step's samples."""
