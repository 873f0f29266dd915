"""Files that survive a crash, and belong to one coordinator at a time.

Imports nothing else of the coordinator. Start with `durable_file`.
"""
