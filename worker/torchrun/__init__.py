"""Several ranks of torch.distributed as one worker: `torchrun ... -m worker --shard`.

For a frozen base that does not fit on one device and is sharded over the ranks. Rank 0 has the
connection and sends each rank its microbatches. Devices that each fit the whole model do not need
torchrun: see `worker.logic.device_group`. Imports `backends`, and `worker.shell.engine` for its
`BackendFactory`.
"""
