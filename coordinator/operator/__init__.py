"""The operator's interfaces: control port, page, event stream, metrics, status, console, log.

Imports all of the coordinator except its commands. Start with `status`.
"""
