"""Gradients travel while the backward of earlier blocks still runs: shown by the trace."""

from __future__ import annotations

import json

from tests.cluster import RUNS, Cluster


def test_a_payload_leaves_before_the_backward_of_the_previous_block_ends(tmp_path):
    """Each block's backward takes 20 ms; on a machine that is busy a sender may still be late."""
    scripted = tmp_path / "scripted.yaml"
    scripted.write_text(
        "task: scripted\nsteps: 3\nbatch: {samples: 2, microbatch: 1}\n"
        "scripted: {blocks: 6, block_bytes: 4096}\n"
    )
    trace = tmp_path / "trace.json"
    with Cluster(tmp_path, "--expect-workers", "1", "--run", str(scripted)) as cluster:
        worker = cluster.worker("w0", "--backend", "scripted:180", "--trace", str(trace))
        cluster.result()
        assert cluster.wait_for_exit(worker) == 0
    events = [event for event in json.loads(trace.read_text()) if event.get("args")]
    overlaps = 0
    for block in range(5, 0, -1):
        sent = [e["ts"] for e in events if e["name"] == f"send block {block}"]
        ended = [
            e["ts"] + e["dur"]
            for e in events
            if e["name"] == f"backward block {block - 1}" and e["args"]["microbatch"] == 1
        ]
        assert len(sent) == len(ended) == 3
        overlaps += sum(early < late for early, late in zip(sent, ended, strict=True))
    assert overlaps  # without streaming there would be none


def test_the_real_backward_streams_too(tmp_path):
    """The digits MLP on torch: its last block leaves before its first block is differentiated."""
    trace = tmp_path / "trace.json"
    wide = ("--set", "digits.hidden=[512, 512, 512, 512]", "--set", "steps=8")
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "digits.yaml"), *wide
    ) as cluster:
        worker = cluster.worker("w0", "--backend", "cpu", "--trace", str(trace))
        cluster.result()
        assert cluster.wait_for_exit(worker) == 0
    events = [event for event in json.loads(trace.read_text()) if event.get("args")]
    last = max(e["args"]["block"] for e in events if e["name"].startswith("send block"))
    sent = [e for e in events if e["name"] == f"send block {last}"]
    ended = {
        e["args"]["step"]: e["ts"] + e["dur"]
        for e in events
        if e["name"] == "backward block 0" and e["args"]["microbatch"] == 23
    }
    assert len(sent) == len(ended) == 8
    # Without streaming there would be none; a busy machine may hold a sender back now and then.
    assert any(e["ts"] < ended[e["args"]["step"]] for e in sent)
