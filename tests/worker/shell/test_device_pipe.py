"""Orders and reports between a worker and its device processes, some of them killed."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections import deque
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args

import msgpack
import numpy as np
import pytest

from backends.base.interface import Batch, Loss, LossFailed
from protocol.base.errors import (
    BackendUnavailable,
    DataError,
    DeviceError,
    MainMemoryTooSmall,
    SamestepError,
    SharedMemoryFull,
    SubnormalsFlushed,
    UsageError,
)
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.machine import shared_memory
from protocol.machine.shared_memory import Extent, SharedMemory
from protocol.spec.files.blob_list import BlobFile, BlobList, BlobSource
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.run_spec import parse_run_spec
from tests.live_service import scripted_spec
from worker.logic import actions as act
from worker.logic import events
from worker.shell.device_pipe import Pipe, order_codec, report_codec
from worker.shell.device_processes import DeviceProcesses
from worker.shell.input_directory import local_spec

STEP_ID, SUBTREE = events.StepId(3, 1, loss_scale=512.0), Subtree(0, 2)
VALUES = np.arange(6, dtype=np.float32)
BLOCK = Block(name="a", kind="block", tensors=(TensorSpec(name="a", shape=(6,)),))
MANIFEST = Manifest(blocks=(BLOCK,), train_samples=64, evaluation_parts=2)
ORDERS = (
    act.OpenDevice(), act.Build("r", scripted_spec(), keep_state=True),
    act.Compute(STEP_ID, 4, SUBTREE),
    act.LoadInnerState(STEP_ID, 1, 2, VALUES.view(np.uint8), with_carried=True), act.CancelWork(),
    act.LoadEmbeddings(STEP_ID, VALUES.view(np.uint8)),
    act.CancelSubtree(STEP_ID, SUBTREE), act.Evaluate(3, 1), act.ReadInitial(),
    act.AttachReplica({"parameters": [VALUES, VALUES]}, 3, 2, was_reset=True),
    act.TakeWeights(3, 2, None), act.TakeWeights(3, 2, 1), act.ReleaseReplica(),
)  # fmt: skip
REPORTS = (
    events.Built("r", MANIFEST, "0", 0, "1", "2", "probe", "cpu", "CPU"),
    events.BlockSum(STEP_ID, SUBTREE, 1, VALUES, 2.0),
    events.NonFiniteSum(STEP_ID, NonFinite(SUBTREE)),
    events.MicrobatchRows(STEP_ID, SUBTREE, 1, VALUES.view(np.uint8).reshape(4, 6)),
    events.InnerPhaseStep(STEP_ID, SUBTREE, 3),
    events.InnerCheckpoint(STEP_ID, SUBTREE, 3, VALUES.view(np.uint8)),
    events.InnerStateNeeded(STEP_ID, 4, SUBTREE, with_carried=True),
    events.SubtreeDone(STEP_ID, SUBTREE, Loss(2.0, 3.0), 1.5, unlike_microbatches=(0, 1)),
    events.FilesNeeded(("a", "b"), for_subtree=(STEP_ID, 4, SUBTREE)),
    events.FilesNeeded(("a",), for_part=(3, 1)), events.PartEvaluated(3, 1, {"samples": 2.0}),
    events.InitialParameters([VALUES, VALUES]), events.WeightsTaken(3, keeps_reading=True),
    events.ReplicaReleased(),
)  # fmt: skip


def test_order_round_trip():
    memory = SharedMemory()
    codec = order_codec(memory)
    for order in ORDERS:
        assert comparable(codec.unpack(through_msgpack(codec.pack(order)))) == comparable(order)
    assert {type(order) for order in ORDERS} == set(get_args(act.GroupOrder))
    shared_array = memory.new_array(6)
    shared_array[:] = VALUES
    unpacked = codec.unpack(
        through_msgpack(codec.pack(act.AttachReplica({"parameters": [shared_array]}, 0, 0, True)))
    )
    shared_array[0] = 7
    assert unpacked.arrays["parameters"][0][0] == 7, "an array in shared memory is not copied"


def test_report_round_trip_returns_its_memory():
    memory, unneeded = SharedMemory(), deque[Extent]()
    codec = report_codec(memory, unneeded)
    for report in REPORTS:
        assert comparable(codec.unpack(through_msgpack(codec.pack(report)))) == comparable(report)
    assert len(unneeded) == 5


def through_msgpack(packed):
    return msgpack.unpackb(msgpack.packb(packed), strict_map_key=False)


def comparable(value):
    """Return all fields of a message, also those that equality ignores, and arrays as bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value), [comparable(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [comparable(each) for each in value]
    return value


@pytest.mark.parametrize(
    "error",
    [
        DataError("the frozen tensor 'a' changed"), BackendUnavailable("cuda", "no driver"),
        SubnormalsFlushed("a thread"), DeviceError("card", "lost"), MainMemoryTooSmall(2, 1),
    ],
)  # fmt: skip
def test_error_keeps_its_class_and_text(error):
    codec = report_codec(SharedMemory())
    for event in (events.DeviceFailed(error), events.BuildFailed("r", error, is_local=True)):
        unpacked = codec.unpack(through_msgpack(codec.pack(event)))
        assert (type(unpacked.error), str(unpacked.error)) == (type(error), str(error))
        assert vars(unpacked.error) == vars(error)


def test_library_error_arrives_as_text():
    codec = report_codec(SharedMemory())
    unpacked = codec.unpack(
        through_msgpack(codec.pack(events.DeviceFailed(MemoryError("too large"))))
    )
    assert (type(unpacked.error), str(unpacked.error)) == (SamestepError, "too large")
    loss_error = LossFailed("the loss raises", Batch({}, 1.0))
    unpacked = codec.unpack(through_msgpack(codec.pack(events.TaskRefused("r", loss_error))))
    assert (type(unpacked.error), str(unpacked.error)) == (DataError, "the loss raises")


def test_run_spec_with_local_files_arrives_unchanged():
    """A directory of captured logits is read whole, although the user's document has no such
    key."""
    blob = BlobFile(name="capture.json", size=1, digest="0" * 64)
    listing = BlobList(sources=(BlobSource(role="data", form="directory", files=(blob,)),))
    spec, _ = local_spec(
        parse_run_spec({
            "task": "distil", "steps": 1, "model": {"source": "m"}, "data": {"train": "logits"},
        }),
        listing,
        Path("inputs"),
    )  # fmt: skip
    codec = order_codec(SharedMemory())
    assert (
        codec.unpack(through_msgpack(codec.pack(act.Build("r", spec, keep_state=False)))).spec
        == spec
    )


def frame_of(packed):
    document = msgpack.packb(packed)
    return len(document).to_bytes(4, "little") + document


def block_sum(block):
    return events.BlockSum(STEP_ID, SUBTREE, block, np.full(1000, block, np.float32), 2.0)


def test_only_complete_reports_of_a_killed_device_are_read():
    """The device is killed at every byte of its last report."""
    device_memory = SharedMemory()
    codec = report_codec(device_memory)
    first_frame, last = frame_of(codec.pack(block_sum(1))), frame_of(codec.pack(block_sum(2)))
    for byte_count in range(len(last)):
        worker_end, device_end = socket.socketpair()
        device_end.sendall(first_frame + last[:byte_count])
        device_end.close()  # as the system does for a killed process
        (event,) = [codec.unpack(packed) for packed in Pipe(worker_end).receive()]
        assert isinstance(event, events.BlockSum)
        assert (event.step_id, event.subtree, event.block, event.weight) == (
            STEP_ID,
            SUBTREE,
            1,
            2.0,
        )
        assert event.values.tolist() == [1.0] * 1000
        worker_end.close()


def test_full_shared_memory_is_one_line_without_a_report(monkeypatch):
    device_memory = SharedMemory()
    monkeypatch.setattr(shared_memory, "_reserve", fail_to_reserve)
    with pytest.raises(SharedMemoryFull, match="close other programs") as error_info:
        report_codec(device_memory).pack(block_sum(1))
    assert "\n" not in str(error_info.value)


def fail_to_reserve(_, offset, size):
    raise SharedMemoryFull(offset + size, 0)


@pytest.mark.parametrize("system_call", ["ftruncate", "mmap"])
def test_limit_on_shared_memory_is_one_line(monkeypatch, system_call):
    """The limits of ulimit -f and ulimit -v."""

    def fail_to_allocate(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap if system_call == "mmap" else os, system_call, fail_to_allocate)
    with pytest.raises(UsageError, match="got 'Cannot allocate memory'; run ulimit -v unlimited"):
        DeviceProcesses({"a": None, "b": None}, "cpu", print)
