"""Several processes of torch.distributed as one member: `torchrun ... -m worker`.

Rank 0 leads: it has the connection, and shares out each node's microbatches. The others follow:
they compute what they are told. `group` is how they talk, `leader` and `follower` are the two
sides, `sharded` is a base that lies across the ranks. Imports `backends`, and tasks by what it is
given.
"""
