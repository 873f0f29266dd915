"""What `coordinator doctor` and `worker doctor` share: findings, and how they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from protocol.base.errors import ExitCode

Outcome = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Attributes:
        check: What was looked at; stable, for scripts.
        outcome: A failure keeps the daemon from working; a warning is worth a look.
        found: What there is.
        advice: What to do; empty if it is ok.
    """

    check: str
    outcome: Outcome
    found: str
    advice: str = ""

    def line(self) -> str:
        """For a person."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.outcome:<8} {self.check}: {self.found}{advice}"


def ok(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, advice: str) -> Finding:
    """It works, but perhaps not as wanted."""
    return Finding(check, "warning", found, advice)


def failure(check: str, found: str, advice: str = "") -> Finding:
    """It cannot work; errors of ours say in `found` what to do."""
    return Finding(check, "failure", found, advice)


def tell(findings: Iterable[Finding], echo: Callable[[str], None], *, as_json: bool) -> ExitCode:
    """Print findings, each as it comes, or all as one document.

    Args:
        findings: What the checks give; they run while this goes through them.
        echo: Prints a line.
        as_json: One document at the end: `ok` and `checks`.

    Returns:
        FAILED if there is a failure; warnings do not count.
    """
    told: list[Finding] = []
    for finding in findings:
        told.append(finding)
        if not as_json:
            echo(finding.line())
    sound = all(finding.outcome != "failure" for finding in told)
    if as_json:
        echo(json.dumps({"ok": sound, "checks": [asdict(each) for each in told]}, indent=2))
    return ExitCode.OK if sound else ExitCode.FAILED
