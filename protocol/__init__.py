"""Definitions that both daemons share: run spec, manifest, frames, messages, tree, exact update."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 13
