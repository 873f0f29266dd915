"""Members that average slices among themselves, instead of all at the coordinator.

`share.py` decides, pure: what goes to which owner, what is added, what is still to come. `links.py`
and `door.py` are the connections between members, in threads with blocking sockets. `exchange.py`
puts both together for the client. May import protocol. Start with `share.py`.
"""
