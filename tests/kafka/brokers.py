"""What is sent through small brokers, and what comes out."""

from __future__ import annotations

import itertools
import time
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from otel_rollout import rollout
from otel_rollout.kafka import KafkaGroup, KafkaGroups, Rebuilder
from tests.kit.recording import Clients, Recording

SETTINGS = {"topic.metadata.refresh.interval.ms": "200", "max.in.flight": "1"}
"""One request at a time: of several, the client's small broker acknowledges records, after errors,
that it does not have."""


def play(recording: Recording, clients: Clients, groups: int = 2) -> None:
    """Groups of two, each sample with a rollout inside it."""
    client = clients.sync(clients.serve())
    for group, index in itertools.product(range(groups), range(2)):
        with rollout("agent", group_id=f"g{group}", sample_index=index, group_size=2):
            message: Any = {"role": "user", "content": f"{group} {index}"}
            client.chat.completions.create(model="m", messages=[message])
            with rollout("helper"):
                client.chat.completions.create(model="m", messages=[message])


def send(cluster: Any, topic: str, spans: Any) -> None:
    """As a collector does, keyed by trace; a record for each span."""
    for span in spans:
        key = f"{span.context.trace_id:032x}"
        cluster.produce(topic, encode_spans([span]).SerializeToString(), key)
    cluster.flush(10)


def rebuild(
    brokers: str, topics: dict[str, str], count: int, what: str = "written"
) -> dict[str, int]:
    """Run one process until so many trajectories are written; what it counted."""
    rebuilder = Rebuilder(
        brokers, spans=topics["spans"], trajectories=topics["trajectories"], settings=SETTINGS
    )
    deadline = time.monotonic() + 30
    while rebuilder.counts[what] < count and time.monotonic() < deadline:
        rebuilder.run_once(0.05)
    rebuilder.close()
    return dict(rebuilder.counts)


def groups(brokers: str, topics: dict[str, str], start: Any = None) -> list[KafkaGroup]:
    """All groups that are there."""
    reader = KafkaGroups(
        brokers, topic=topics["trajectories"], start=start or {}, idle_seconds=3, settings=SETTINGS
    )
    with reader:
        return list(reader)
