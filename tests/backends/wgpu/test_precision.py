"""A Vulkan worker refuses an unsupported precision, and the coordinator receives the reason."""

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
REFUSAL = (
    "expected model.precision float32 or float16, got bfloat16: "
    "Vulkan and canonical arithmetic support no other"
)
SPEC = RegressRun(
    task="regress", steps=1, batch=BatchSpec(samples=8, microbatch=8),
    optimizer=Sgd(name="sgd", lr=0.1),
)  # fmt: skip


class Bfloat16Regress(Regress):
    """A small task in a precision that Vulkan does not support."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.trainable = replace(self.trainable, precision="bfloat16")


class BackendFactory:
    """Provides the Vulkan backend and a task class."""

    def __init__(self, task_class: type[Regress]) -> None:
        from backends.wgpu.backend import VulkanBackend

        self._task_class = task_class
        self._backend = VulkanBackend(0)

    def backend(self):
        return self._backend

    def task(self, spec: RunSpec) -> Regress:
        return self._task_class(spec)

    def close(self) -> None:
        self._backend.device.close()


@pytest.fixture
def factory(request: pytest.FixtureRequest) -> Iterator[BackendFactory]:
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    vulkan_factory = BackendFactory(request.param)
    yield vulkan_factory
    vulkan_factory.close()


@pytest.mark.parametrize("factory", [Bfloat16Regress], indirect=True)
def test_bfloat16_is_refused(factory):
    task = factory.task(SPEC)
    with pytest.raises(SamestepError, match=REFUSAL):
        factory.backend().compile(task.trainable, task.batch([0, 1]))


@pytest.mark.parametrize(
    ("factory", "is_refused"), [(Bfloat16Regress, True), (Regress, False)], indirect=["factory"]
)
def test_the_worker_reports_the_refusal_to_the_coordinator(factory, is_refused):
    engine_events: queue.Queue[events.Event] = queue.Queue()
    engine = Engine(factory, engine_events.put)
    engine.do(act.Build("run", SPEC, keep_state=False))
    event = engine_events.get(timeout=PATIENCE_S)
    engine.close()

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
    (message,) = (
        action.message for action in session.result(event) if isinstance(action, Transmit)
    )
    if is_refused:
        assert message == msg.Unready(run_id="run", reason=REFUSAL, own=True, exit_code=1)
    else:
        assert isinstance(message, msg.Ready)
