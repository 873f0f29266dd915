"""Communication between the daemons: messages, frames, connection, authentication, TLS.

`connection` is the protocol without I/O; `transport` does the I/O. Imports `protocol.base`,
`protocol.spec` and `protocol.exact`. Start with `messages`.
"""
