"""Several ranks of torch.distributed as one worker: `torchrun ... -m worker --shard`.

This is for a frozen base that does not fit on one device: the ranks shard it. Rank 0 has the
connection to the coordinator, and sends each rank its microbatches. Devices that can each hold the
whole model do not need torchrun: see `worker.logic.device_group`. Imports `backends`, and
`worker.shell.engine` for its `BackendFactory`.
"""
