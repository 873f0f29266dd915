"""What both daemons agree on: run spec, manifest, frames, messages, tree algebra, exact update."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 13
