"""Tests of `benchmarks.cards` on a machine without cards: it runs to its end and reports skipped
parts."""

from __future__ import annotations

import sys

import pytest

from benchmarks import cards
from benchmarks.cards import Devices, Part, report, run_parts_in_order

NO_CARDS = Devices(why_no_vulkan="no Vulkan loader")
TORCH_AND_VULKAN = Devices(("a card",), "a card")


def test_without_a_card_every_part_is_skipped_with_its_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cards, "find_devices", lambda: NO_CARDS)
    monkeypatch.setattr(sys, "argv", ["cards", "--report", str(tmp_path / "cards.md")])
    cards.main()
    report = (tmp_path / "cards.md").read_text()
    assert "| eager suite | skipped: torch has no card here |  | 0 |" in report
    assert "| Vulkan suite | skipped: no card with Vulkan: no Vulkan loader |  | 0 |" in report
    assert report.count("| skipped: ") == len(cards.PARTS)
    assert "Vulkan suite: skipped" in capsys.readouterr().out


def test_part_is_stopped_at_its_time_limit_and_keeps_its_output():
    endless = "import time; print('begun', flush=True); time.sleep(600)"
    parts = [
        Part("good", ("-c", "print(6 * 7)"), ("cuda",), 60),
        Part("bad", ("-c", "raise SystemExit(3)"), ("vulkan",), 60),
        Part("endless", ("-c", endless), (), 1),
    ]
    passed_part, failed_part, stopped_part = run_parts_in_order(parts, TORCH_AND_VULKAN, 60)
    assert (passed_part.result, passed_part.output) == ("passed", "42")
    assert failed_part.result == "failed: exit code 3"
    assert stopped_part.result == "failed: not done within 1 s"
    late_outcomes = [*run_parts_in_order(parts, TORCH_AND_VULKAN, 0)]
    assert all(
        outcome.result.startswith("skipped: no time is left; run it with --only")
        for outcome in late_outcomes
    )
    assert "```\n42\n```" in report(TORCH_AND_VULKAN, [passed_part, failed_part, stopped_part])


@pytest.mark.parametrize("part", cards.PARTS, ids=lambda part: part.name)
def test_files_of_part_exist(part):
    files = [argument for argument in part.arguments if argument.startswith("tests/")]
    assert all((cards.ROOT / file).exists() for file in files)


def test_driver_crash_ends_only_the_probing_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    devices = cards.find_devices()
    assert devices.reason_against(["card"]) == "the search for cards ended with exit code 1: "
    assert devices.reason_against(["vulkan"]).startswith(
        "no card with Vulkan: the search for cards ended"
    )
