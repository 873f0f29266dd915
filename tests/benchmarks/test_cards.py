"""Tests of `benchmarks.cards` without cards: skipped, failed and stopped parts, and the report."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import cards
from benchmarks.cards import Devices, Part, format_report, run_parts_in_order

NO_CARDS = Devices(why_no_vulkan="no Vulkan loader")
TORCH_AND_VULKAN = Devices(("a card",), "a card")


def test_without_a_card_every_part_is_skipped_with_its_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cards, "find_devices", lambda: NO_CARDS)
    monkeypatch.setattr(sys, "argv", ["cards", "--report", str(tmp_path / "cards.md")])
    cards.main()
    report_text = (tmp_path / "cards.md").read_text()
    assert "| eager suite | skipped: torch has no card here |  | 0 |" in report_text
    assert "| Vulkan suite | skipped: no card with Vulkan: no Vulkan loader |  | 0 |" in report_text
    assert report_text.count("| skipped: ") == len(cards.PARTS)
    assert "Vulkan suite: skipped" in capsys.readouterr().out


def test_report_contains_the_result_and_output_of_each_part():
    endless = "import time; print('begun', flush=True); time.sleep(600)"
    parts = [
        Part("good", ("-c", "print(6 * 7)"), ("cuda",), 60),
        Part("bad", ("-c", "raise SystemExit(3)"), ("vulkan",), 60),
        Part("endless", ("-c", endless), (), 1),
    ]
    passed, failed, stopped = run_parts_in_order(parts, TORCH_AND_VULKAN, 60)
    assert (passed.result, passed.output) == ("passed", "42")
    assert failed.result == "failed: exit code 3"
    assert stopped.result == "failed: not done within 1 s"
    outcomes_without_time = [*run_parts_in_order(parts, TORCH_AND_VULKAN, 0)]
    assert all(
        outcome.result.startswith("skipped: no time is left; run it with --only")
        for outcome in outcomes_without_time
    )
    assert "```\n42\n```" in format_report(TORCH_AND_VULKAN, [passed, failed, stopped])


@pytest.mark.parametrize("part", cards.PARTS, ids=lambda part: part.name)
def test_test_files_of_each_part_exist(part):
    files = [argument for argument in part.arguments if argument.startswith("tests/")]
    assert all((cards.ROOT / file).exists() for file in files)


def test_crash_in_the_search_for_cards_is_the_reason_to_skip_every_card(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")  # a command that fails, as a driver may
    devices = cards.find_devices()
    assert devices.reason_to_skip(["card"]) == "the search for cards ended with exit code 1: "
    assert devices.reason_to_skip(["vulkan"]).startswith(
        "no card with Vulkan: the search for cards ended"
    )


def test_selections_of_tests_occur_in_their_files():
    selecting_parts = [
        part for part in cards.PARTS if "-k" in (*part.arguments, *part.quick_arguments)
    ]
    assert selecting_parts
    for part in selecting_parts:
        arguments = (*part.arguments, *part.quick_arguments)
        paths = [cards.ROOT / text for text in arguments if text.startswith("tests/")]
        files = [
            file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))
        ]
        source = "\n".join(str(file) + file.read_text() for file in files)
        expressions = [arguments[n + 1] for n, text in enumerate(arguments) if text == "-k"]
        words = {word for text in expressions for word in re.findall(r"\w+", text)}
        assert [word for word in words - {"and", "not", "or"} if word not in source] == []
