"""Metrics for Prometheus, read from the service at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.service.service import Service


class ServiceMetrics(Collector):
    """A collector for one service; `registry` holds it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield one sample of every metric."""
        workers = len(self._service.sessions)
        yield GaugeMetricFamily("samestep_workers", "Connected workers", value=workers)
        yield GaugeMetricFamily(
            "samestep_event_loop_hold_seconds",
            "Longest processor time that the event loop was blocked",
            value=self._service.loop_watch.longest_hold_ms / 1000,
        )
        execution = self._service.current
        if execution is None:
            return
        run = execution.run
        yield GaugeMetricFamily("samestep_step", "Steps committed", value=run.steps_committed)
        yield GaugeMetricFamily("samestep_view", "Membership view", value=run.members.view)
        if run.losses:
            yield GaugeMetricFamily("samestep_loss", "Loss of the last step", value=run.losses[-1])
        speed = GaugeMetricFamily(
            "samestep_ms_per_microbatch", "Measured time of a microbatch", labels=["worker"]
        )
        steps_done = GaugeMetricFamily(
            "samestep_microbatches", "Microbatches computed in this run", labels=["worker"]
        )
        for member in run.members:
            steps_done.add_metric([member.name], member.microbatches)
            if member.ms_per_microbatch is not None:
                speed.add_metric([member.name], member.ms_per_microbatch)
        yield speed
        yield steps_done
