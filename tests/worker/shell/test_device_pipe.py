"""Orders and reports between a host and the processes of its devices."""

from __future__ import annotations

from typing import Any

from protocol.exact.tree import Node
from worker.logic import actions as act
from worker.logic import events
from worker.shell.device_pipe import Reports, pack_order, pack_report, unpack_order

NO_ARRAYS: Any = None
PLACE = events.StepAttempt(3, 1, loss_scale=512.0)


def test_a_node_keeps_its_scale_of_losses_also_where_it_waits_for_files():
    order = unpack_order(pack_order(act.Compute(PLACE, 4, Node(0, 2)), NO_ARRAYS), NO_ARRAYS)
    assert isinstance(order, act.Compute)
    assert (order, order.place.loss_scale) == (act.Compute(PLACE, 4, Node(0, 2)), 512.0)
    wanted = events.FilesWanted(("a",), for_node=(PLACE, 4, Node(0, 2)))
    told = Reports(NO_ARRAYS).unpack(pack_report(wanted, NO_ARRAYS))
    assert isinstance(told, events.FilesWanted)
    assert told.for_node is not None
    assert (told, told.for_node[0].loss_scale) == (wanted, 512.0)
