"""What people see and say: control port, page, events, metrics, status, console, log.

Imports all of the coordinator but its commands. Start with `status`.
"""
