"""The directory of a finished run: its audit is sound, and detects every changed file."""

from __future__ import annotations

from coordinator.audit.audit import audit
from protocol.base.errors import SamestepError
from tests.event_loop import on_uvloop
from tests.live_service import live_service, scripted_spec

REMOVABLE = {"metrics.json", ".log"}
"""The journal has the metrics, too; a run may remove old segments of the log."""


def is_detected(path):
    try:
        return not audit(path).ok
    except SamestepError:
        return True


@on_uvloop
async def test_changed_or_missing_files_of_a_finished_run_are_detected(tmp_path):
    async with live_service(tmp_path, 1) as live:
        live.start_worker("w0")
        run_id = live.service.submit(scripted_spec(steps=3, evaluate_every=1))
        await live.result(run_id)
    path = tmp_path / run_id
    assert audit(path).ok
    files = [
        file
        for file in sorted(path.rglob("*"))
        # The model card is for its owner to edit.
        if file.is_file() and file.name not in {"lock", "README.md"}
    ]
    assert {"terms.json", "result.json", "journal.jsonl"} <= {file.name for file in files}
    undetected = []
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        if not is_detected(path):
            undetected.append(("changed", file.relative_to(path).as_posix()))
        file.unlink()
        if not {file.name, file.suffix} & REMOVABLE and not is_detected(path):
            undetected.append(("missing", file.relative_to(path).as_posix()))
        file.write_bytes(content)
    assert undetected == []
    assert audit(path).ok
