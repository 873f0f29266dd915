"""A Vulkan device refuses a precision that it lacks, in one line."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from backends.wgpu.device.adapters import adapters
from protocol.base.errors import SamestepError
from protocol.spec.run_spec import RegressRun, RunSpec
from protocol.spec.sections.optimizer import Sgd
from protocol.spec.sections.tasks import BatchSpec
from protocol.wire import messages as msg
from worker.logic import actions as act
from worker.logic import events
from worker.logic.actions import Transmit
from worker.logic.session import WorkerSession
from worker.shell.engine import Engine
from worker.tasks.small.regress import Regress

PATIENCE_S = 60.0
LINE = (
    "expected model.precision float32 or float16, got bfloat16: "
    "Vulkan and canonical arithmetic support no other"
)
SPEC = RegressRun(
    task="regress", steps=1, batch=BatchSpec(samples=8, microbatch=8),
    optimizer=Sgd(name="sgd", lr=0.1),
)  # fmt: skip


class InBfloat16(Regress):
    """The smallest task, in a precision that models may request."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.trainable = replace(self.trainable, precision="bfloat16")


class BackendFactory:
    """The real device with the task of a test."""

    def __init__(self, task: type[Regress]) -> None:
        from backends.wgpu.backend import VulkanBackend

        self._task = task
        self._backend = VulkanBackend(0)

    def backend(self):
        return self._backend

    def task(self, spec: RunSpec) -> Regress:
        return self._task(spec)

    def close(self) -> None:
        self._backend.device.close()


@pytest.fixture
def toolbox(request: pytest.FixtureRequest) -> Iterator[BackendFactory]:
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    factory = BackendFactory(request.param)
    yield factory
    factory.close()


@pytest.mark.parametrize("toolbox", [InBfloat16], indirect=True)
def test_bfloat16_is_refused_before_anything_is_captured(toolbox):
    task = toolbox.task(SPEC)
    with pytest.raises(SamestepError, match=LINE):
        toolbox.backend().compile(task.trainable, task.batch([0, 1]))


@pytest.mark.parametrize(
    ("toolbox", "refused"), [(InBfloat16, True), (Regress, False)], indirect=["toolbox"]
)
def test_coordinator_learns_why_the_device_is_unusable(toolbox, refused):
    messages: queue.Queue[events.Event] = queue.Queue()
    device = Engine(toolbox, messages.put)
    device.do(act.Build("run", SPEC, keep_state=False))
    event = messages.get(timeout=PATIENCE_S)
    device.close()

    session = WorkerSession()
    session.welcome(
        msg.Welcome(
            worker="ann", term=1, heartbeat_interval_ms=1000, liveness_timeout_ms=8000, key=b""
        )
    )
    session.receive(
        msg.StartRun(run_id="run", term=1, step=0, blobs=None),
        np.frombuffer(SPEC.to_bytes(), np.uint8),
    )
    (message,) = (each.message for each in session.result(event) if isinstance(each, Transmit))
    if refused:
        assert message == msg.Unready(run_id="run", reason=LINE, own=True, exit_code=1)
    else:
        assert isinstance(message, msg.Ready)
