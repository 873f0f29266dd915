"""The planner's predictions: the plot in the docs shows them, and measurements are near them."""

from pathlib import Path

import pytest

from benchmarks import planned
from coordinator.run.exchange.times import Volume, predict_sharded_s, predict_star_s


def test_plot_in_the_docs_is_current():
    plot = Path(__file__).parents[2] / "docs" / "images" / "ways.svg"
    assert plot.read_text() == planned.plot(1.0), "write it: python -m benchmarks.planned --plot"


def test_predictions_are_within_15_percent_of_measurements():
    for case, *_, ratio in planned.comparison_rows():
        assert float(ratio) == pytest.approx(1, abs=0.15), case


def test_table_names_the_best_topology_of_each_row():
    topologies = {row[0]: row[-1] for row in planned.rows(1.0)}
    assert len(topologies) == 4 * 4 * 3, "links, sizes and numbers of hosts"
    assert set(topologies.values()) <= {"star", "sharded", "replicas"}
    assert topologies["0.1 Gbit/s, 5.3 MB, 4 hosts"] == "sharded"
    assert topologies["0.1 Gbit/s, 4 GB, 64 hosts"] == "replicas"
    assert planned.predict(4, 100, 5_300_000).star == predict_star_s(
        Volume(5_300_000, 5_300_000, 12), planned.equal_members(4, 100)
    )
    assert predict_sharded_s(Volume(1, 1, 1), planned.equal_members(4, 100)) < 0.01


def test_two_levels_of_stars_are_between_one_star_and_sharded():
    for case, star, two_levels, sharded in planned.many_hosts_rows():
        assert float(sharded) < float(two_levels) < float(star), case
