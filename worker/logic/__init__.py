"""A worker's decisions, pure: messages and results in, actions out.

No clock, socket, file, thread or randomness, and no device. Start with `session`.
"""
