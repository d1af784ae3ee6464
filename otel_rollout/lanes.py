"""The lanes on which spans leave this process, for `configure` to set up and `shutdown` to end.

On the train lane a `Sender` for each exporter sends the spans that rollouts are rebuilt from. On
the look lane the SDK's batch processor sends all others, for people; it may drop some.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_BSP_MAX_QUEUE_SIZE,
)
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.look import otlp_exporter, train_exporter
from otel_rollout.providers import remove_processor
from otel_rollout.record import (
    Outlet,
    Sender,
    Settings,
    TrajectorySpanProcessor,
    delay_seconds,
    in_time,
    is_ours,
    process_state,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

logger = logging.getLogger("otel_rollout")

_QUEUE_SIZE = 16_384
"""Spans that may wait on the look lane: the SDK's 2,048 are those of a rollout of 1,000 calls."""
_BATCH_SIZE = 512
"""The SDK's number of spans in a batch."""
_LAST_SECONDS = 5.0
"""Time that exporters have for their own shutdown, whatever the flush before it took."""


class LookProcessor(BatchSpanProcessor):
    """The SDK's batch processor, without spans that a `Sender` sends.

    leaves_out: returns True for a span that is not exported here.
    """

    def __init__(self, outlet: Outlet, leaves_out: Callable[[ReadableSpan], bool]) -> None:
        queue, batch = _sizes()  # the SDK refuses some values of the variables
        super().__init__(outlet, queue, 1000 * delay_seconds(), batch)
        self._leaves_out = leaves_out

    def on_end(self, span: ReadableSpan) -> None:
        """Export the span later, if it is sampled and not left out."""
        if not self._leaves_out(span):
            super().on_end(span)


def otlp_lanes(settings: Settings, *, has_look: bool) -> list[LookProcessor | Sender]:
    """The processors that export over OTLP, as the settings and the environment ask for it.

    has_look: False: the owner of the provider exports what people look at.
    ConfigurationError for an address, a protocol or a folder that cannot be used.
    """
    folder, found = settings.train_folder, list[LookProcessor | Sender]()
    endpoint = settings.train_endpoint or os.environ.get("OTEL_ROLLOUT_TRAIN_ENDPOINT") or None
    train = train_exporter(endpoint) if endpoint or has_look else None
    if train is not None:
        found.append(Sender(Outlet(train), settings.max_bytes, folder))
    elif folder is not None:
        raise ConfigurationError(
            f"configure(train_folder={str(folder)!r}): expected a receiver of what waits there, "
            f"got none; set train_endpoint"
        )
    if has_look and (look := otlp_exporter()) is not None:
        found.append(LookProcessor(Outlet(look), is_call if endpoint else is_ours))
    return found


@dataclass(slots=True)
class Lanes:
    """The processors of one provider that `configure` added."""

    provider: TracerProvider
    processor: TrajectorySpanProcessor
    senders: list[Sender] = field(default_factory=list)
    look: list[LookProcessor] = field(default_factory=list)
    metrics: MeterProvider | None = None
    """The meter provider that `configure` made. None: it made none."""

    def add(self, exporter: SpanExporter, max_bytes: int) -> None:
        """Export all spans to this exporter, if it is new."""
        if all(sender.outlet.exporter is not exporter for sender in self.senders):
            outlet = Outlet(exporter, users=2)
            self.use([LookProcessor(outlet, is_ours), Sender(outlet, max_bytes)])

    def use(self, processors: Iterable[LookProcessor | Sender]) -> None:
        """Give these the spans of the provider from now on."""
        for processor in processors:
            if isinstance(processor, Sender):
                self.senders.append(processor)
            else:
                self.look.append(processor)
            self.provider.add_span_processor(processor)

    def flush_and_end(self, deadline: float, *, own_provider: bool) -> bool:
        """Flush the provider, and end our processors; False if that was not done by the deadline.

        own_provider: False: the provider goes on, without our processors.
        """

        def left() -> int:
            return max(0, int((deadline - time.monotonic()) * 1000))

        # All at once: a trajectory exporter that hangs must not take the time of the spans.
        flushed: list[TracerProvider | SpanProcessor] = [self.provider, *self.look, *self.senders]
        calls = [(each, partial(each.force_flush, left())) for each in flushed]
        late = in_time(calls, left() / 1000)
        in_its_time = self.processor.end(left())
        seconds = left() / 1000 + _LAST_SECONDS
        late += in_time([(each, each.shutdown) for each in self.look], seconds)
        # Each sender keeps to its own time, and logs what is lost when that is over.
        ends: list[tuple[object, Callable[[], object]]] = [
            (each, partial(each.end, left())) for each in self.senders
        ]
        if self.metrics is not None:
            ends.append((self.metrics, partial(self.metrics.shutdown, left())))
        late += in_time(ends, left() / 1000 + 2 * _LAST_SECONDS)
        if own_provider:
            late += in_time([(self.provider, self.provider.shutdown)], seconds)
        else:
            for processor in (self.processor, *self.look, *self.senders):
                remove_processor(self.provider, processor)
        return in_its_time and not late

    def log_lost(self) -> bool:
        """True if trajectories or spans of ours did not arrive; senders have logged how many."""
        lost = [sender for sender in self.senders if sender.lost and not sender.refuses_all]
        process_state.ended_exporters.update(sender.outlet.exporter for sender in self.senders)
        if self.processor.dropped:
            logger.error("%d trajectories did not reach their exporters", self.processor.dropped)
        return self.processor.dropped > 0 or bool(lost)


def is_call(span: ReadableSpan) -> bool:
    """True for the span of a model call that rollouts are rebuilt from."""
    return is_ours(span) and sc.EXCHANGE_VERSION in (span.attributes or {})


def _sizes() -> tuple[int, int]:
    """Size of the queue and of a batch; the one that no variable has follows from the other."""
    queue = os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip()
    batch = os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "").strip()
    batch_size = max(1, int(batch)) if batch.isdecimal() else _BATCH_SIZE
    if queue.isdecimal() and int(queue):
        return int(queue), min(batch_size, int(queue))
    return max(_QUEUE_SIZE, batch_size), batch_size
