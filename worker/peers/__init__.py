"""A worker's side of the gradient exchange: sums go to owners, averages come back.

`gradient_exchange.py` is pure and decides what is sent to which owner and what is added. `links.py`
connects workers, with the transport, acceptor and authentication of `protocol.wire`. May import
protocol and `worker.logic`. Start with `gradient_exchange.py`.
"""
