"""Definitions that both daemons share: run spec, manifest, frames, messages, tree, exact update.

Start with `spec`, then `wire` and `exact`.
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 13
