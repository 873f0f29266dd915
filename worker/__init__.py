"""The worker daemon: owns one device or several, computes subtrees, and takes every step.

Start with `logic`, which decides; `shell` executes its decisions.
"""
