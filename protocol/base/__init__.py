"""Errors, limits, and types that all packages share.

Imports no other chapter. Start with `errors`: the tree of errors and the exit codes.
"""
