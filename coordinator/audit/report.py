"""The report of a run: one HTML page, made from the journal, and an audit's result if there is one.

The page loads nothing and executes nothing. Every text from outside is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from coordinator.audit.audit import AuditResult
from coordinator.audit.history import History, read_history
from coordinator.audit.svg_chart import Point, line_chart
from coordinator.run.outputs.events import Halted, ViewChanged
from coordinator.storage.directory.journal import Entry, VerifiedJournal, verify_journal
from coordinator.storage.directory.journal_records import (
    RECORDS,
    CommandReceived,
    Ended,
    Fault,
    Resumed,
    record_name,
)
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base.errors import UsageError
from protocol.spec.run_spec import drop_unused_sections
from protocol.spec.sections.tasks import BatchSpec
from protocol.spec.unit import unit_text

_MOST_ROWS: Final = 2_000
_MOST_CHARTS: Final = 4
"""The most metrics with a chart; the table shows more."""
_MOST_COLUMNS: Final = 8
_ARTICLES: Final = {
    10: "data and data governance",
    12: "record-keeping",
    13: "transparency",
    15: "accuracy, robustness and cybersecurity",
}
STYLE: Final = """
:root { color-scheme: light dark; --back: #f4f5f7; --box: #fff; --ink: #1b1f24; --soft: #59626d;
  --line: #d9dee4; --curve: #0072b2; --smooth: #d55e00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --back: #0f1215; --box: #181c21; --ink: #e7ebef;
  --soft: #a0aab5; --line: #2e353d; --curve: #56b4e9; --smooth: #e69f00; --bad: #ff9187; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  background: var(--back); color: var(--ink); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
section > table, .charts figure { background: var(--box); border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .9em; }
th, td { text-align: left; vertical-align: top; padding: .3rem .7rem;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); font-size: .85em; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font-size: .9em; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr));
  gap: .8rem; margin-bottom: .8rem; }
figure { margin: 0; padding: .6rem .8rem; } figcaption { font-weight: 600; font-size: .9em; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); } .line, .smooth { fill: none; stroke: var(--curve); }
.line { stroke-width: 1.2; } .smooth { stroke: var(--smooth); stroke-width: 2; }
circle.line { fill: var(--curve); }
.bad { color: var(--bad); font-weight: 600; } .empty { color: var(--soft); }
.cells { width: auto; } .cells td { text-align: right; min-width: 3.5rem; position: relative;
  font-variant-numeric: tabular-nums; } .cells th { text-align: right; }
.cells svg { position: absolute; inset: 0; height: 100%; opacity: .4; }
.cells rect { fill: var(--curve); } .cells span { position: relative; }
@page { margin: 1.5cm; }
@media print { :root { color-scheme: light; --back: #fff; --box: #fff; --ink: #000; --soft: #444;
  --line: #bbb; --curve: #0072b2; --smooth: #d55e00; --bad: #b3261e; }
  body { font-size: 10pt; margin: 0; padding: 0; max-width: none; }
  h1, h2 { break-after: avoid; } figure, tr { break-inside: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } rect, polyline { print-color-adjust: exact; } }
"""
_CELL: Final = re.compile(r"confusion\[(.*)\]\[(.*)\]")


def report(path: Path, audited: AuditResult | None = None) -> str:
    """Return the page for the run in a directory.

    Args:
        path: The run's directory.
        audited: The result of an audit, to be included.

    Raises:
        UsageError: There is no run.
        StorageFailed: A file cannot be read.
        StorageDamaged: A file is damaged; a bad line of the journal is only noted.
    """
    directory = RunDirectory(path)
    run = directory.read_run()
    if run is None or not directory.journal.exists():
        raise UsageError(
            f"expected a run in {str(path)!r}, found no run.json or no journal; name the directory "
            "of a run that has begun"
        )
    verified = verify_journal(directory.journal)
    history = read_history(verified.entries)
    sections = [
        _summary(verified, history),
        _charts(verified.entries, history),
        _evaluations(history),
        _faults(verified.entries),
        _inputs(history),
        _digests(history),
        _audit(audited),
        _articles(verified.entries),
    ]
    return _page(f"Run {run.run_id}", sections)


def _page(title: str, sections: Iterable[str]) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *(f"<section>{section}</section>" for section in sections if section),
            "</body></html>\n",
        ]
    )


def _epochs(history: History) -> list[tuple[str, object]]:
    """Return the row with the number of completed epochs, if the run spec counts epochs."""
    spec = history.spec
    if spec is None or history.manifest is None or not spec.get("epochs"):
        return []
    samples = spec["batch"]["samples"]
    passes = len(history.commits) / -(-history.manifest.train_samples // samples)
    return [("epochs", f"{passes:.3g} of {spec['epochs']}")]


def _unit(history: History) -> list[tuple[str, object]]:
    """Return the row with the unit of computation on which gradients depend."""
    if history.start is None:
        return []
    batch = BatchSpec.model_validate(history.start.spec["batch"])
    return [("unit", unit_text(batch, None))]


def _summary(verified: VerifiedJournal, history: History) -> str:
    entries = verified.entries
    end = history.end[1] if history.end is not None else None
    losses = [commit.loss for _, commit in history.commits if commit.loss is not None]
    rows: list[tuple[str, object]] = [
        ("outcome", f"{end.outcome}: {end.reason}" if end else "not ended"),
        ("steps committed", len(history.commits)),
        *_epochs(history),
        *_unit(history),
        ("skipped steps", sum(commit.skipped for _, commit in history.commits)),
        ("last loss", f"{losses[-1]:.6g}" if losses else "-"),
        ("resumed", history.resume_count),
        ("from", _moment(entries[0]) if entries else "-"),
        ("to", _moment(entries[-1]) if entries else "-"),
        ("lines in the journal", len(entries)),
        ("journal's head", verified.head),
    ]
    body = _table((), rows)
    if verified.bad_line is not None:
        text = f"line {verified.bad_line} of the journal is bad ({verified.reason}); "
        body += f'<p class="bad">{escape(text)}this page covers the lines before it.</p>'
    return body


def _charts(entries: Sequence[Entry], history: History) -> str:
    commits = [commit for _, commit in history.commits]

    def by_step(name: str) -> list[Point]:
        return [(float(c.step + 1), _number(getattr(c, name))) for c in commits]

    drawings = [
        _figure("Loss", line_chart(by_step("loss"), x_label="step", y_label="loss", smooth=True)),
        *(
            _figure(title, line_chart(by_step(name), x_label="step", y_label=title.lower()))
            for name, title in (("norm", "Gradient norm"), ("rate", "Learning rate"))
            if any(getattr(commit, name) is not None for commit in commits)
        ),
        _figure(
            "Time of a step",
            line_chart(_step_times(entries, history), x_label="step", y_label="seconds"),
        ),
        _figure(
            "Workers",
            line_chart(
                _workers_over_time(entries), x_label="minutes", y_label="workers", stairs=True
            ),
        ),
    ]
    return f"<h2>Curves</h2>{_side_by_side(drawings)}"


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def _side_by_side(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _step_times(entries: Sequence[Entry], history: History) -> list[Point]:
    """Return the time between each two consecutive commits of one coordinator, in seconds."""
    times = {entry.number: datetime.fromisoformat(entry.time) for entry in entries}
    return [
        (float(commit.step + 1), (times[number] - times[previous_number]).total_seconds())
        for (previous_number, earlier), (number, commit) in pairwise(history.commits)
        if earlier.term == commit.term
    ]


def _workers_over_time(entries: Sequence[Entry]) -> list[tuple[float, float]]:
    if not entries:
        return []
    start = datetime.fromisoformat(entries[0].time)

    def minutes(entry: Entry) -> float:
        return (datetime.fromisoformat(entry.time) - start).total_seconds() / 60

    points = [(0.0, 0.0)]
    for entry in entries:
        match entry.record:
            case ViewChanged() as view:
                points.append((minutes(entry), float(len(view.members))))
            case Resumed():
                points.append((minutes(entry), 0.0))
    return [*points, (minutes(entries[-1]), points[-1][1])]


def _evaluations(history: History) -> str:
    """Show the metrics of steps that were not rolled back."""
    evaluations = [history.evaluations[step] for step in sorted(history.evaluations)]
    if not any(evaluation.metrics for evaluation in evaluations):
        return ""
    metric_names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)
    names = [name for name in metric_names if not _CELL.fullmatch(name)]
    charts = [
        _figure(
            name,
            line_chart(
                [
                    (float(evaluation.step), _number(evaluation.metrics.get(name)))
                    for evaluation in evaluations
                ],
                x_label="step", y_label=name,
            ),
        )
        for name in names[:_MOST_CHARTS]
    ]  # fmt: skip
    rows = [
        (
            evaluation.step,
            *(_format_value(evaluation.metrics.get(name)) for name in names[:_MOST_COLUMNS]),
        )
        for evaluation in evaluations
    ]
    table = _table(("after step", *names[:_MOST_COLUMNS]), rows)
    newest = evaluations[-1]
    rest = [(name, _format_value(newest.metrics.get(name))) for name in names[_MOST_COLUMNS:]]
    others = _table(("metric, at the end", "value"), rest) if rest else ""
    return (
        f"<h2>Evaluation metrics</h2>{_side_by_side(charts)}{table}{others}"
        f"{_confusion(newest.step, newest.metrics)}"
    )


def _format_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _confusion(step: int, metrics: Mapping[str, float | None]) -> str:
    """Show counts by true and predicted label, shaded by their share of the row."""
    cells = {
        (match[1], match[2]): value or 0.0
        for name, value in metrics.items()
        if (match := _CELL.fullmatch(name))
    }
    if not cells:
        return ""
    labels = [*dict.fromkeys(true_label for true_label, _ in cells)]
    rows = []
    for true_label in labels:
        row_total = sum(cells.get((true_label, predicted), 0.0) for predicted in labels) or 1.0
        shaded = "".join(
            _cell_of(cells.get((true_label, predicted), 0.0), row_total) for predicted in labels
        )
        rows.append(f'<tr><th scope="row">{escape(true_label)}</th>{shaded}</tr>')
    heads = "".join(f'<th scope="col">{escape(predicted)}</th>' for predicted in labels)
    return (
        f"<h2>Confusion after step {step}</h2><p>Rows: true label. Columns: predicted "
        f'label.</p><table class="cells"><tr><td></td>{heads}</tr>{"".join(rows)}</table>'
    )


def _cell_of(count: float, row_total: float) -> str:
    shade = (
        '<svg aria-hidden="true"><rect width="100%" height="100%" '
        f'fill-opacity="{count / row_total:.2f}"/></svg>'
    )
    return f"<td>{shade}<span>{count:g}</span></td>"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _faults(entries: Sequence[Entry]) -> str:
    rows = [row for entry in entries if (row := _fault_row(entry)) is not None]
    body = _table(("time", "step", "what", "worker", "reason and response"), rows)
    return "<h2>Faults, commands and responses</h2>" + (body if rows else "<p>None.</p>")


def _moment(entry: Entry) -> str:
    """Format a line's time to the second; the journal has more digits."""
    return datetime.fromisoformat(entry.time).strftime("%Y-%m-%d %H:%M:%S UTC")


def _fault_row(entry: Entry) -> tuple[object, ...] | None:
    time = _moment(entry)
    match entry.record:
        case Halted() as halt:
            return time, halt.step, "halt", halt.worker or "", halt.reason
        case Fault() as fault:
            note = f"{fault.reason}; {fault.response}".strip("; ")
            return time, fault.step, fault.what, fault.worker or "", note
        case CommandReceived() as command:
            return time, command.step, "command", "", f"{command.command} {command.source}"
        case Resumed() as resumed:
            notes = "; ".join(resumed.notes)
            reason = f"coordinator of term {resumed.term}; {notes}".strip("; ")
            return time, resumed.step, "resumed", "", reason
        case ViewChanged(change="lost" | "joined" | "late" | "drained" | "reseeded") as view:
            subject = f"{len(view.members)} workers from now on"
            reason = f"{view.reason}; {subject}".strip("; ")
            return time, view.step, view.change, view.worker or "", reason
        case Ended(outcome="failed") as end:
            return time, end.step, "failed", "", end.reason
        case _:
            return None


def _inputs(history: History) -> str:
    rows: list[tuple[str, object]] = []
    if history.manifest is not None:
        rows += sorted(history.manifest.digests.items())
        rows.append(("manifest", history.manifest.manifest_digest))
        rows.append(("training samples", history.manifest.train_samples))
        rows += sorted(history.manifest.notes.items())
    if history.start is not None:
        rows.append(("run spec", history.start.spec_digest))
        rows += sorted(history.start.versions.items())
        rows += [
            (f"spec: {key}", value)
            for key, value in _flat(drop_unused_sections(history.start.spec))
        ]
    for change in history.changes:
        rows += [
            (f"changed after {change.step} steps", change_text) for change_text in change.changes
        ]
        rows.append((f"run spec after {change.step} steps", change.spec_digest))
    return "<h2>Data, model and settings</h2>" + _table((), rows)


def _digests(history: History) -> str:
    rows: list[tuple[object, ...]] = [
        (c.step, "checkpoint", c.weights_digest, c.state_digest)
        for _, c in sorted(history.checkpoints.items())
    ]
    if history.end is not None:
        end = history.end[1]
        rows.append((end.step, "end", end.weights_digest or "-", end.state_digest or "-"))
    return "<h2>Digests</h2>" + _table(("after step", "", "weights", "whole state"), rows)


def _audit(audited: AuditResult | None) -> str:
    if audited is None:
        return ""
    rows = [("ok" if f.ok else "BAD", f.check, f.text) for f in audited.findings]
    verdict = "Sound." if audited.ok else "Not sound."
    mark = "" if audited.ok else ' class="bad"'
    return f"<h2>Audit</h2><p{mark}>{verdict}</p>" + _table(("", "check", "finding"), rows)


def _articles(entries: Sequence[Entry]) -> str:
    counts: dict[str, int] = {}
    for entry in entries:
        name = record_name(type(entry.record))
        counts[name] = counts.get(name, 0) + 1
    rows = [
        (
            record_name(record),
            counts.get(record_name(record), 0),
            ", ".join(str(article) for article in record.articles),
            record.purpose,
        )
        for record in RECORDS
    ]
    names = "; ".join(f"{number}: {name}" for number, name in _ARTICLES.items())
    return (
        "<h2>Records and the EU AI Act</h2>"
        f"<p>Articles of Regulation (EU) 2024/1689 that each kind of record serves ({names}). "
        "An article may ask for more than keeping a record.</p>"
        + _table(("record", "lines", "articles", "purpose"), rows)
    )


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, value in document.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            rows.append((f"{prefix}{key}", value))
    return rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    parts = ["<table>"]
    if heads:
        parts.append("<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>")
    parts += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows[:_MOST_ROWS]]
    parts.append("</table>")
    if len(rows) > _MOST_ROWS:
        parts.append(f"<p>{len(rows) - _MOST_ROWS} more are in the journal.</p>")
    return "".join(parts)


def _cell(value: object) -> str:
    text = escape(str(value))
    if isinstance(value, int):
        return f'<td class="number">{text}</td>'
    long_hex = len(text) == 64 and text.isalnum()
    return f"<td>{f'<code>{text}</code>' if long_hex else text}</td>"
