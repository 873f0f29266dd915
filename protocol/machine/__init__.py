"""This machine: its memory, processor, caches and secrets; sockets and shared memory.

Imports `protocol.base`. Start with `machine`.
"""
