"""Admission of workers: acceptor, handshake, keys, certificate, announcement.

Imports nothing else of the coordinator. Start with `session`.
"""
