"""Losses that a backend computes in parts: a large vocabulary, and losses that couple samples."""
