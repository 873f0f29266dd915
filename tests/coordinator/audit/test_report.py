"""The report: one page that summarizes the run, loads nothing, and trusts no text."""

import html
import math
import os
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.audit.audit import audit
from coordinator.audit.report import report
from coordinator.audit.svg_chart import HEIGHT, WIDTH, line_chart
from coordinator.run.outputs.events import Evaluated, Halted
from coordinator.storage.directory.journal_records import (
    RECORDS,
    CommandReceived,
    Fault,
    Resumed,
    record_name,
)
from protocol.base.errors import UsageError
from tests.commands import run_command
from tests.durable_run import RUN_ID, SPEC, WrittenRun, written_run

EVIL = "<script>alert(1)</script>\"'&</svg>"


class Page(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open_tags: list[str] = []
        self.feed(text)
        self.close()
        assert self._open_tags == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open_tags.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


def write_eventful_run(path):
    run = WrittenRun(path, skip=(4,))
    run.step()
    run.step()
    run.record_view("lost", "a", worker="b")
    run.journal.append(
        Fault(term=1, step=2, what="straggler", worker="a", reason=EVIL, response="subtrees moved")
    )
    run.step()
    run.checkpoint()
    run.crash_and_resume()
    run.journal.append(Halted(term=2, step=3, attempt=0, reason="NaN in block 'head'", worker="a"))
    run.journal.append(CommandReceived(term=2, step=3, command="continue", source="control port"))
    run.record_view("joined", "a", "b", worker="b")
    while run.replica.step < SPEC.steps:
        run.step()
    return run.finish()


def test_page_summarizes_the_run(tmp_path):
    path = write_eventful_run(tmp_path / "run")
    page = Page(report(path, audit(path)))
    for part in (
        RUN_ID, "finished: all done", "straggler", "subtrees moved", "NaN in block 'head'",
        "continue control port", "coordinator of term 2", "lost", "joined", "accuracy", "0.75",
        "a" * 64, "b" * 64, "optimizer.lr", "samestep", "Sound.", "covered exactly once",
    ):  # fmt: skip
        assert part in page.text, part
    for record_type in RECORDS:
        assert record_name(record_type) in page.text
        assert record_type.purpose in page.text
    assert page.tags.count("figure") == 6
    for title in ("Loss", "Gradient norm", "Learning rate", "Time of a step", "Workers"):
        assert title in page.text


def test_page_shows_only_spec_keys_of_the_task(tmp_path):
    page = Page(report(write_eventful_run(tmp_path / "run")))
    for part in ("spec: batch.samples", "spec: regress.features", "spec: threads"):
        assert part in page.text
    for part in ("spec: digits", "spec: scripted", "spec: model"):
        assert part not in page.text


def test_confusion_matrix_is_shown_as_a_grid(tmp_path):
    run = WrittenRun(tmp_path / "run")
    run.step()
    counts = {("ham", "ham"): 90.0, ("ham", EVIL): 10.0, (EVIL, "ham"): 3.0, (EVIL, EVIL): 7.0}
    figures = {
        f"confusion[{true}][{predicted}]": count for (true, predicted), count in counts.items()
    }
    metrics = {"accuracy": 97 / 110, **figures}
    run.journal.append(Evaluated(term=1, step=1, metrics=metrics))
    run.journal.sync()
    text = report(tmp_path / "run")
    page = Page(text)
    texts = [word.strip() for word in page.words if word.strip()]
    offset = texts.index("Confusion after step 1")
    grid = [EVIL, "ham", EVIL, "7", "3", "ham", "10", "90"]
    cells = [word for word in texts[offset + 1 :] if word in grid]
    assert cells[: len(grid)] == grid
    assert "confusion[" not in page.text
    assert 'fill-opacity="0.90"' in text
    assert "@media print" in text


def test_page_loads_and_runs_nothing(tmp_path):
    text = report(write_eventful_run(tmp_path / "run"))
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in {"src", "href"} or name[:2] == "on"]
    assert "http://" not in text.replace("http-equiv", "")
    assert "https://" not in text
    assert "url(" not in text
    assert "default-src 'none'" in html.unescape(text)


def test_external_text_is_escaped(tmp_path):
    page = Page(report(write_eventful_run(tmp_path / "run")))
    assert EVIL in "".join(page.words)


def test_damaged_line_is_reported_after_the_lines_before_it(tmp_path):
    path = written_run(tmp_path / "run")
    content = (path / "journal.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    lines[9] = lines[9].replace(b'"term":1', b'"term":2')
    (path / "journal.jsonl").write_bytes(b"".join(lines))
    page = Page(report(path, audit(path)))
    assert "line 10 of the journal is bad" in page.text
    assert "Not sound." in page.text


def test_started_run_has_a_page(tmp_path):
    WrittenRun(tmp_path / "run").journal.sync()
    page = Page(report(tmp_path / "run"))
    assert "not ended" in page.text
    assert "no values" in page.text


def test_a_directory_without_a_run_is_reported(tmp_path):
    with pytest.raises(UsageError, match="found no run"):
        report(tmp_path)


values = st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, 0.0, 1e-300])


@example([0.0, 5e-324], False)
@given(st.lists(values, max_size=40), st.booleans())
def test_any_chart_is_svg_within_its_frame(ys, stairs):
    points = [(float(x), y) for x, y in enumerate(ys)]
    text = line_chart(points, x_label="a & b", y_label="<y>", stairs=stairs)
    if not any(map(math.isfinite, ys)):
        assert "no values" in text
        return
    drawing = ET.fromstring(text)
    for line in drawing.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


@pytest.mark.parametrize(
    ("points", "x_marks", "y_marks"),
    [
        ([(1, 2), (3, 3)], ["1", "2", "3"], ["2", "3"]),
        ([(1, 0.0), (9, 1.5)], ["2", "4", "6", "8"], ["0", "0.5", "1", "1.5"]),
        ([(4, 1)], ["4"], ["1"]),
    ],
)
def test_integer_axis_has_integer_ticks(points, x_marks, y_marks):
    pairs = [(float(x), float(y)) for x, y in points]
    drawing = ET.fromstring(line_chart(pairs, x_label="step", y_label="workers"))
    marks = [
        (text.attrib.get("text-anchor"), text.text)
        for text in drawing.iter("text")
        if re.fullmatch(r"[-\d.e]+", text.text or "")
    ]
    assert [text for anchor, text in marks if anchor == "middle"] == x_marks
    assert [text for anchor, text in marks if anchor == "end"] == y_marks


def test_curve_of_many_points_is_overlaid_with_its_average():
    points = [(float(x), float(x % 2) + 0.5) for x in range(40)]
    text = line_chart(points, x_label="step", y_label="loss", smooth=True)
    assert text.count("<polyline") == 2
    assert 'class="smooth"' in text


def test_a_long_curve_is_thinned_and_keeps_its_peaks():
    points = [(float(x), 0.0 if x != 31_337 else 9.0) for x in range(100_000)]
    text = line_chart(points, x_label="step", y_label="loss")
    assert len(text) < 60_000
    assert len(re.findall(r",12\.0\b", text)) == 1


def test_metrics_of_rolled_back_steps_are_not_shown(tmp_path):
    run = WrittenRun(tmp_path / "run")
    run.step()
    for step, accuracy in ((1, 0.25), (5, 0.625)):
        run.journal.append(Evaluated(term=1, step=step, metrics={"accuracy": accuracy}))
    run.journal.append(Resumed(term=2, step=1, optimizer_step=1))
    run.journal.append(Evaluated(term=2, step=2, metrics={"accuracy": 0.875}))
    run.journal.sync()
    text = Page(report(tmp_path / "run")).text
    assert "0.25" in text
    assert "0.875" in text
    assert "0.625" not in text
    assert "accuracy by step" in text


@pytest.mark.parametrize("output", ["nowhere/page.html", "."])
def test_unwritable_page_is_reported_before_the_audit(tmp_path, output):
    run = written_run(tmp_path / "run")
    completed = run_command("coordinator", "report", str(run), "--output", str(tmp_path / output))
    assert completed.returncode == 2
    assert "--output: expected a file that can be written" in completed.stderr


def test_page_is_written_to_a_device_and_through_a_link(tmp_path):
    run = written_run(tmp_path / "run")
    device, link = tmp_path / "null", tmp_path / "link"
    link.symlink_to(tmp_path / "page.html")
    device.symlink_to("/dev/null")
    for output in (device, link):
        completed = run_command("coordinator", "report", str(run), "--output", str(output))
        assert completed.returncode == 0, completed.stderr
        assert output.is_symlink()
        assert completed.stdout == ("" if output is device else f"{link}\n")
    assert (tmp_path / "page.html").read_text().startswith("<!")
    os.mkfifo(tmp_path / "pipe")
    completed = run_command("coordinator", "report", str(run), "--output", str(tmp_path / "pipe"))
    assert "start the process that reads from the pipe" in completed.stderr
    assert completed.returncode != 0
