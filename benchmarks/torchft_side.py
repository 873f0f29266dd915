"""The reference for `benchmarks.diloco`: a replica of torchft's DiLoCo, or its lighthouse.

An interpreter with torchft runs this script, which imports nothing of samestep. The replica's steps
have a fixed duration, and its gradients pull the weights toward a number that depends on replica
and step.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

_PATIENCE = timedelta(seconds=30)


def print_message(**fields: Any) -> None:
    """Print a line for the parent process."""
    print(json.dumps(fields), flush=True)


def run_lighthouse() -> None:
    """Run torchft's lighthouse until standard input ends."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    print_message(address=f"http://127.0.0.1:{server.address().rsplit(':', 1)[1].rstrip('/')}")
    sys.stdin.read()
    server.shutdown()


def run_replica(settings: dict[str, Any]) -> None:
    """Train once standard input ends, and report each round."""
    torch.set_num_threads(1)
    number, inner_s = settings["replica"], settings["inner_ms"] / 1000
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(settings["block_elements"])) for _ in range(settings["blocks"])
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        min_replica_size=1,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=f"replica_{number}",
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
        lighthouse_addr=settings["lighthouse"],
        use_async_quorum=False,
        timeout=_PATIENCE, quorum_timeout=_PATIENCE, connect_timeout=_PATIENCE,
    )  # fmt: skip
    print_message(ready=True)
    sys.stdin.read()  # ends when the other replicas are ready too
    steps = settings["inner_steps"]
    with DiLoCo(manager, [model], inner, outer, sync_every=steps):
        for round_ in range(settings["rounds"]):
            for step in range(steps):
                start_s = time.monotonic()
                pull = (number + 1) / (1 + (round_ * steps + step) % 7)
                for parameter in model.parameters():
                    parameter.grad = parameter.detach() - pull
                if step == steps // 2:
                    print_message(halfway=round_)
                time.sleep(max(0.0, inner_s - (time.monotonic() - start_s)))
                inner.step()  # the last step of a round waits for the exchange
            print_message(
                round=round_, at_s=time.monotonic(), taking_part=manager.num_participants(),
                committed=manager.current_step(), digest=_digest(model),
            )  # fmt: skip
    manager.shutdown()


def _digest(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        run_lighthouse()
    else:
        run_replica(json.loads(sys.argv[1]))
