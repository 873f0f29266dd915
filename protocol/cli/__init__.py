"""Code that both commands share: arguments, signals, standard streams, systemd, and `doctor`.

Imports `protocol.base` and `protocol.machine`. Start with `command_line`.
"""
