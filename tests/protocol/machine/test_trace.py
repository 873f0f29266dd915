"""Traces: valid JSON that a viewer reads, from several threads, whenever it is closed."""

import json
import os
import threading

import pytest

from protocol.base.errors import UsageError
from protocol.machine.trace import Tracer, now_us


def events_of(path):
    return [event for event in json.loads(path.read_text()) if event]


def test_instants_and_spans_are_written(tmp_path):
    path = tmp_path / "trace.json"
    before = now_us()
    with Tracer(path, "worker w0") as tracer:
        tracer.instant("send block 3", "network", step=2, block=3)
        tracer.span("backward block 2", "device", before, step=2)
    after = now_us()
    name, instant, span = events_of(path)
    assert name["ph"] == "M"
    assert name["args"] == {"name": "worker w0"}
    assert (instant["ph"], instant["name"], instant["tid"]) == ("i", "send block 3", "network")
    assert instant["args"] == {"step": 2, "block": 3}
    assert before <= instant["ts"] <= after
    assert (span["ph"], span["ts"]) == ("X", before)
    assert instant["ts"] <= span["ts"] + span["dur"] <= after


def test_many_threads_write_whole_lines(tmp_path):
    path = tmp_path / "trace.json"

    def write(track):
        for number in range(200):
            tracer.instant("tick", track, number=number)

    with Tracer(path, "p") as tracer:
        threads = [threading.Thread(target=write, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ticks = [event for event in events_of(path) if event["name"] == "tick"]
    for track in range(4):
        own_numbers = [event["args"]["number"] for event in ticks if event["tid"] == f"t{track}"]
        assert own_numbers == list(range(200))


def test_events_after_closing_are_dropped(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path, "p")
    tracer.close()
    tracer.instant("late", "t")
    tracer.close()
    assert [event["name"] for event in events_of(path)] == ["process_name"]


def test_unread_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"--trace .* cannot be written"):
        Tracer.to_file(tmp_path / "pipe", "worker w0")
