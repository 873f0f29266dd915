"""The pure core of a worker: messages and results in, actions out.

It uses no clock, socket, file, thread, random source or device. Start with `session`.
"""
