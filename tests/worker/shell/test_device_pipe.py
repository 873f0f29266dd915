"""Orders and reports between a host and the processes of its devices; what of one that is killed
while it writes is read."""

from __future__ import annotations

import errno
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from protocol.base.errors import DataError, SharedMemoryFull, UsageError
from protocol.exact.tree import Node
from protocol.host import shared_memory
from protocol.host.shared_memory import SharedMemory
from protocol.spec.blob_list import BlobFile, BlobList, BlobSource
from protocol.spec.run_spec import parse_run_spec
from worker.logic import actions as act
from worker.logic import events
from worker.shell.device_pipe import Pipe, Reports, pack_order, pack_report, unpack_order
from worker.shell.device_processes import DeviceProcesses
from worker.shell.input_directory import placed_spec

NO_ARRAYS: Any = None
PLACE, NODE = events.StepAttempt(3, 1, loss_scale=512.0), Node(0, 2)


def test_a_node_keeps_its_scale_of_losses_also_where_it_waits_for_files():
    order = unpack_order(pack_order(act.Compute(PLACE, 4, Node(0, 2)), NO_ARRAYS), NO_ARRAYS)
    assert isinstance(order, act.Compute)
    assert (order, order.place.loss_scale) == (act.Compute(PLACE, 4, Node(0, 2)), 512.0)
    wanted = events.FilesWanted(("a",), for_node=(PLACE, 4, Node(0, 2)))
    told = Reports(NO_ARRAYS).unpack(pack_report(wanted, NO_ARRAYS))
    assert isinstance(told, events.FilesWanted)
    assert told.for_node is not None
    assert (told, told.for_node[0].loss_scale) == (wanted, 512.0)


def test_what_training_moved_arrives_with_its_exit_code():
    moved = events.TaskRefused("r", DataError("the frozen tensor 'a' changed"))
    told = Reports(NO_ARRAYS).unpack(pack_report(moved, NO_ARRAYS))
    assert isinstance(told, events.TaskRefused)
    assert (told.run_id, str(told.error)) == ("r", str(moved.error))
    assert told.error.exit_code == moved.error.exit_code


def test_a_run_spec_whose_sources_are_local_files_arrives_as_it_is():
    """A directory of captured logits is read whole: that is no key of the user's document."""
    listed = BlobFile(name="capture.json", size=1, digest="0" * 64)
    listing = BlobList(sources=(BlobSource(role="data", form="directory", files=(listed,)),))
    spec, _ = placed_spec(
        parse_run_spec({
            "task": "distil", "steps": 1, "model": {"source": "m"}, "data": {"train": "logits"},
        }),
        listing,
        Path("inputs"),
    )  # fmt: skip
    order = unpack_order(pack_order(act.Build("r", spec, keep=False), NO_ARRAYS), NO_ARRAYS)
    assert isinstance(order, act.Build)
    assert order.spec == spec


def framed(packed):
    document = msgpack.packb(packed)
    return len(document).to_bytes(4, "little") + document


def block_sum(block):
    return events.BlockSum(PLACE, NODE, block, np.full(1000, block, np.float32), 2.0)


def test_of_a_device_that_is_killed_while_it_writes_only_whole_reports_are_read():
    """At every byte of its last word."""
    own = SharedMemory()
    whole = framed(pack_report(block_sum(1), own))
    last = framed(pack_report(block_sum(2), own))
    for written in range(len(last)):
        ours, its = socket.socketpair()
        its.sendall(whole + last[:written])
        its.close()  # as the system does
        reports = Reports(own)
        (event,) = [reports.unpack(packed) for packed in Pipe(ours).received()]
        assert isinstance(event, events.BlockSum)
        assert (event.place, event.node, event.block, event.weight) == (PLACE, NODE, 1, 2.0)
        assert event.values.tolist() == [1.0] * 1000
        ours.close()


def test_what_has_no_room_in_shared_memory_is_one_line_and_nothing_is_told(monkeypatch):
    own = SharedMemory()
    monkeypatch.setattr(shared_memory, "_reserve", _no_room)
    with pytest.raises(SharedMemoryFull, match="end other programs") as caught:
        pack_report(block_sum(1), own)
    assert "\n" not in str(caught.value)


def _no_room(_, offset, size):
    raise SharedMemoryFull(offset + size, 0)


@pytest.mark.parametrize("refused", ["ftruncate", "mmap"])
def test_a_limit_of_what_a_host_s_devices_share_is_one_line(monkeypatch, refused):
    """Those of ulimit -f and ulimit -v."""

    def no(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap if refused == "mmap" else os, refused, no)
    with pytest.raises(UsageError, match="got 'Cannot allocate memory'; ulimit -v unlimited"):
        DeviceProcesses({"a": None, "b": None}, "cpu", print)
