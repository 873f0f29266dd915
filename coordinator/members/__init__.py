"""Who may join, and how they come in: doorway, handshake, keys, certificate, announcement.

Imports nothing else of the coordinator. Start with `session`.
"""
