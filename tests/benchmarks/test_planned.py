"""Tests of the planner's predictions for many hosts, against the plot in the docs and
measurements."""

from pathlib import Path

import pytest

from benchmarks import planned
from coordinator.run.exchange.times import Volume, predict_sharded_s, predict_star_s


def test_page_shows_the_plot_of_the_command():
    page = Path(__file__).parents[2] / "docs" / "images" / "ways.svg"
    assert page.read_text() == planned.plot(1.0), "write it: python -m benchmarks.planned --plot"


def test_predictions_are_within_15_percent_of_measurements():
    for case, *_, ratio in planned.comparison_rows():
        assert float(ratio) == pytest.approx(1, abs=0.15), case


def test_table_names_the_best_topology_of_each_row():
    topologies = [line[-1] for line in planned.rows(1.0)]
    assert len(topologies) == 48
    assert set(topologies) <= {"star", "sharded", "replicas"}
    assert topologies[0] == "sharded"
    assert topologies[11] == "replicas"
    assert planned.predict(4, 100, 5_300_000).star == predict_star_s(
        Volume(5_300_000, 5_300_000, 12), planned.equal_members(4, 100)
    )
    assert predict_sharded_s(Volume(1, 1, 1), planned.equal_members(4, 100)) < 0.01


def test_two_levels_of_stars_are_between_one_star_and_sharded():
    for case, star, two_levels, sharded in planned.many_hosts_rows():
        assert float(sharded) < float(two_levels) < float(star), case
