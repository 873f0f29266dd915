"""How a worker finds its coordinator, and what it proves itself with.

Imports nothing else of the worker. Start with `credentials`.
"""
