"""Discovery of the coordinator, and the worker's credentials.

Imports nothing else of the worker. Start with `credentials`.
"""
