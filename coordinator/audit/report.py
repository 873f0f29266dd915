"""The report of a run: one HTML page that says what happened, from the journal alone.

It loads nothing and runs nothing. Every text from outside is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from coordinator.audit.audit import AuditResult
from coordinator.audit.history import History, read_history
from coordinator.audit.svg_chart import line_chart
from coordinator.storage.journal import Entry, Verified, verify_journal
from coordinator.storage.journal_records import (
    RECORDS,
    Commanded,
    Ended,
    Fault,
    Halted,
    Resumed,
    ViewChanged,
    kind_of,
)
from coordinator.storage.run_directory import RunDirectory
from protocol.base.errors import UsageError

_MOST_ROWS: Final = 2_000
_MOST_CHARTS: Final = 4
"""Of held-out figures; the table has all."""
_ARTICLES: Final = {
    10: "data and data governance",
    12: "record-keeping",
    13: "transparency",
    15: "accuracy, robustness and cybersecurity",
}
STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9em; }
th, td { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid #8884; overflow-wrap: anywhere; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
code { font-size: .9em; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: currentColor; }
.grid { stroke: #8884; } .line { fill: none; stroke: #2a78d6; stroke-width: 1.6; }
circle.line { fill: #2a78d6; } .bad { color: #c62828; font-weight: 600; }
"""


def report(path: Path, audited: AuditResult | None = None) -> str:
    """The page for the run in a directory.

    Args:
        path: The run's directory.
        audited: What an audit found, to be shown as well.

    Raises:
        UsageError: There is no run there.
        StorageFailed: A file cannot be read.
        StorageDamaged: A file is not what it should be; a bad line of the journal is only noted.
    """
    directory = RunDirectory(path)
    run = directory.read_run()
    if run is None or not directory.journal.exists():
        raise UsageError(f"expected a run in {str(path)!r}, found no run.json or no journal")
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
            *sections,
            "</body></html>\n",
        ]
    )


def _summary(verified: Verified, history: History) -> str:
    entries = verified.entries
    end = history.end[1] if history.end is not None else None
    losses = [commit.loss for _, commit in history.commits if commit.loss is not None]
    rows: list[tuple[str, object]] = [
        ("outcome", f"{end.outcome}: {end.reason}" if end else "not ended"),
        ("steps committed", len(history.commits)),
        ("of them skipped", sum(commit.skipped for _, commit in history.commits)),
        ("last loss", f"{losses[-1]:.6g}" if losses else "-"),
        ("taken up again after a stop", history.resumed),
        ("from", entries[0].time if entries else "-"),
        ("to", entries[-1].time if entries else "-"),
        ("lines in the journal", len(entries)),
        ("journal's head", verified.head),
    ]
    body = _table((), rows)
    if verified.bad_line is not None:
        text = f"line {verified.bad_line} of the journal is bad ({verified.reason}); "
        body += f'<p class="bad">{escape(text)}this page tells of the lines before it.</p>'
    return body


def _charts(entries: Sequence[Entry], history: History) -> str:
    losses = [(float(commit.step), _number(commit.loss)) for _, commit in history.commits]
    loss = line_chart(losses, x_label="step", y_label="loss")
    workers = line_chart(
        _workers_over_time(entries), x_label="minutes", y_label="workers", stairs=True
    )
    return f"<h2>Loss</h2>{loss}<h2>Workers</h2>{workers}"


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
    """Those that count: of steps that were taken back, what was measured anew."""
    figures = [history.figures[step] for step in sorted(history.figures)]
    rows = [
        (each.step, name, "-" if value is None else f"{value:.6g}")
        for each in figures
        for name, value in each.metrics.items()
    ]
    if not rows:
        return ""
    names = dict.fromkeys(name for each in figures for name in each.metrics)
    charts = [
        line_chart(
            [(float(each.step), _number(each.metrics.get(name))) for each in figures],
            x_label="step", y_label=name,
        )
        for name in [*names][:_MOST_CHARTS]
        if len(figures) > 1
    ]  # fmt: skip
    table = _table(("after step", "figure", "value"), rows)
    return f"<h2>Held-out figures</h2>{''.join(charts)}{table}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _faults(entries: Sequence[Entry]) -> str:
    rows = [row for entry in entries if (row := _fault_row(entry)) is not None]
    body = _table(("time", "step", "what", "worker", "why, and what was done"), rows)
    return "<h2>Faults, interventions, and what was done</h2>" + (body if rows else "<p>None.</p>")


def _fault_row(entry: Entry) -> tuple[object, ...] | None:
    match entry.record:
        case Halted() as halt:
            return entry.time, halt.step, "halt", halt.worker or "", halt.reason
        case Fault() as fault:
            done = f"{fault.reason}; {fault.response}".strip("; ")
            return entry.time, fault.step, fault.what, fault.worker or "", done
        case Commanded() as command:
            return entry.time, command.step, "command", "", f"{command.command} {command.source}"
        case Resumed() as resumed:
            notes = "; ".join(resumed.notes)
            why = f"coordinator of epoch {resumed.epoch}; {notes}".strip("; ")
            return entry.time, resumed.step, "resumed", "", why
        case ViewChanged(change="lost" | "joined" | "late" | "drained" | "reseeded") as view:
            who = f"{len(view.members)} workers from here on"
            why = f"{view.reason}; {who}".strip("; ")
            return entry.time, view.step, view.change, view.worker or "", why
        case Ended(outcome="failed") as end:
            return entry.time, end.step, "failed", "", end.reason
        case _:
            return None


def _inputs(history: History) -> str:
    rows: list[tuple[str, object]] = []
    if history.manifest is not None:
        rows += sorted(history.manifest.digests.items())
        rows.append(("manifest", history.manifest.manifest_digest))
        rows.append(("training samples", history.manifest.train_samples))
        rows += sorted(history.manifest.notes.items())
    if history.run is not None:
        rows.append(("run spec", history.run.spec_digest))
        rows += sorted(history.run.versions.items())
        rows += [(f"spec: {key}", value) for key, value in _flat(history.run.spec)]
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
        kind = kind_of(type(entry.record))
        counts[kind] = counts.get(kind, 0) + 1
    rows = [
        (
            kind_of(record),
            counts.get(kind_of(record), 0),
            ", ".join(str(article) for article in record.articles),
            record.serves,
        )
        for record in RECORDS
    ]
    names = "; ".join(f"{number}: {name}" for number, name in _ARTICLES.items())
    return (
        "<h2>Records and the EU AI Act</h2>"
        f"<p>Articles of Regulation (EU) 2024/1689 that each kind of record serves ({names}). "
        "Keeping a record is not all that an article asks.</p>"
        + _table(("record", "lines", "articles", "what it is good for"), rows)
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
