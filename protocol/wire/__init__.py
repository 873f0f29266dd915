"""What goes between the daemons: messages, frames, the connection, who may join, TLS.

`connection` is the protocol without I/O; `transport` is what does the I/O. Imports `protocol.base`,
`protocol.spec` and `protocol.exact`. Start with `messages`.
"""
