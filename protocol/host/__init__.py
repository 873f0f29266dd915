"""What looks at this machine: its memory, processor, caches, secrets; sockets and memory that its
processes share.

Imports `protocol.base`. Start with `machine`.
"""
