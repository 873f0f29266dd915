"""What the two commands have in common: arguments and exit codes, service managers, checks.

Imports `protocol.base` and `protocol.host`. Start with `command_line`.
"""
