"""The exchange of gradients as a worker sees it: sums go to owners, averages come back.

`share.py` decides, pure: what goes to which owner, what is added, what is still missing. `links.py`
connects workers, `sockets.py` opens ports and connections; transport, acceptor and proofs are those
of `protocol.wire`. `exchange.py` joins them for the client. May import protocol. Start with
`share.py`.
"""
