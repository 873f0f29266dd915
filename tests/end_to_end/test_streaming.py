"""Gradients are sent while backward of earlier blocks still runs, as the trace shows."""

from __future__ import annotations

import json

from tests.cluster import RUNS, Cluster


def test_a_payload_leaves_before_the_backward_of_the_previous_block_ends(tmp_path):
    """Each block's backward takes 20 ms; on a busy machine a sender may still be late."""
    scripted = tmp_path / "scripted.yaml"
    scripted.write_text(
        "task: scripted\nsteps: 3\nbatch: {samples: 2, microbatch: 1}\n"
        "scripted: {blocks: 6, block_bytes: 4096}\n"
    )
    trace = tmp_path / "trace.json"
    with Cluster(tmp_path, "--expect-workers", "1", "--run", str(scripted)) as cluster:
        worker = cluster.start_worker("w0", "--backend", "scripted:180", "--trace", str(trace))
        cluster.result()
        assert cluster.wait_for_exit(worker) == 0
    events = [event for event in json.loads(trace.read_text()) if event.get("args")]
    overlaps = 0
    for block in range(5, 0, -1):
        send_events = [e["ts"] for e in events if e["name"] == f"send block {block}"]
        backward_ends = [
            e["ts"] + e["dur"]
            for e in events
            if e["name"] == f"backward block {block - 1}" and e["args"]["microbatch"] == 1
        ]
        assert len(send_events) == len(backward_ends) == 3
        overlaps += sum(
            sent_at < ended_at for sent_at, ended_at in zip(send_events, backward_ends, strict=True)
        )
    assert overlaps  # zero without streaming


def test_real_backward_streams(tmp_path):
    """The digits MLP on torch: its last block leaves before its first block is differentiated."""
    trace = tmp_path / "trace.json"
    wide_options = ("--set", "digits.hidden=[512, 512, 512, 512]", "--set", "steps=8")
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "digits.yaml"), *wide_options
    ) as cluster:
        worker = cluster.start_worker("w0", "--backend", "cpu", "--trace", str(trace))
        cluster.result()
        assert cluster.wait_for_exit(worker) == 0
    events = [event for event in json.loads(trace.read_text()) if event.get("args")]
    last = max(e["args"]["block"] for e in events if e["name"].startswith("send block"))
    send_events = [e for e in events if e["name"] == f"send block {last}"]
    backward_ends = {
        e["args"]["step"]: e["ts"] + e["dur"]
        for e in events
        if e["name"] == "backward block 0" and e["args"]["microbatch"] == 23
    }
    assert len(send_events) == len(backward_ends) == 8
    # Zero without streaming; a busy machine may delay a sender now and then.
    assert any(e["ts"] < backward_ends[e["args"]["step"]] for e in send_events)
