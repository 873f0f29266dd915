"""Several ranks of torch.distributed as one worker: `torchrun ... -m worker --shard`.

For a frozen base that does not fit on one device and is sharded across the ranks. Rank 0 has the
connection and sends each rank its microbatches. Devices that each hold the whole model need no
torchrun: see `worker.logic.device_group`. Imports `backends`; builds tasks through its
`BackendFactory`.
"""
