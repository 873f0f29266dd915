"""Which samples are held out, and digests of what was read.

Imports nothing else of the worker. Start with `holdout`.
"""
