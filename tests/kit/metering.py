"""A global meter provider for one test, and what was measured; also as Prometheus names it."""

from __future__ import annotations

from typing import Any

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Metric, Sum
from opentelemetry.util._once import Once

from otel_rollout import semconv


class Meter:
    """The global meter provider, and what was measured."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])
        metrics.set_meter_provider(self.provider)

    def metrics(self) -> list[Metric]:
        """The metrics of ours."""
        data = self._reader.get_metrics_data()
        return [
            metric
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            if scope.scope.name == semconv.SCOPE
            for metric in scope.metrics
        ]

    def points(self) -> dict[str, list[tuple[dict[str, Any], Any]]]:
        """The data points of each metric of ours, with their attributes."""
        return {
            metric.name: [
                (dict(point.attributes or {}), point) for point in metric.data.data_points
            ]
            for metric in self.metrics()
        }

    def sums(self, name: str, attribute: str) -> dict[Any, float]:
        """The sum of a metric by one attribute."""
        sums: dict[Any, float] = {}
        for attributes, point in self.points().get(name, ()):
            key = attributes.get(attribute)
            value = point.value if hasattr(point, "value") else point.sum
            sums[key] = sums.get(key, 0) + value
        return sums

    def close(self) -> None:
        """Make the global meter provider unset again."""
        self.provider.shutdown()
        metrics._internal._METER_PROVIDER = None
        metrics._internal._PROXY_METER_PROVIDER = metrics._internal._ProxyMeterProvider()
        metrics._internal._METER_PROVIDER_SET_ONCE = Once()


def prometheus_names(metric: Metric) -> list[str]:
    """The names of its series, as the collector's and the SDK's exporters for Prometheus make them.

    Dots become underscores, a unit in braces vanishes, "s" is written out, a sum that only grows
    ends in `_total`, a histogram has three series.
    """
    name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
    if isinstance(metric.data, Histogram):
        return [f"{name}_bucket", f"{name}_count", f"{name}_sum"]
    grows = isinstance(metric.data, Sum) and metric.data.is_monotonic
    return [f"{name}_total" if grows else name]
