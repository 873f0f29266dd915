"""What looks at this machine or speaks to it: caches, secrets, memory, systemd, the terminal.

Imports `protocol.base`. Start with `host_checks`.
"""
