"""The real Kafka, a broker of its own for a test, which can be killed and started again."""

from __future__ import annotations

import subprocess
import time
import uuid
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.backends.hosts import Host, Program
from tests.backends.programs import TOOLS

PARTITIONS = 4
LIMIT = 16 << 20
"""Bytes of a record at most."""
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{controller}
listeners=PLAINTEXT://{broker},CONTROLLER://{controller}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
message.max.bytes={limit}
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=false
"""


@dataclass
class Broker:
    """One broker, which is its own controller."""

    program: Program
    address: str
    admin: Any

    def start(self) -> Broker:
        """Start it, and wait until it answers."""
        self.program.start()
        deadline = time.monotonic() + 90
        while True:
            try:
                self.admin.list_topics(timeout=2)
            except Exception:  # whatever the client raises meanwhile
                if time.monotonic() > deadline or self.program.has_ended():
                    pytest.fail(self.program.log.read_text()[-3000:])
            else:
                return self

    def create(self, *topics: str, limit: int = LIMIT) -> None:
        """Create topics."""
        new: Any = import_module("confluent_kafka.cimpl").NewTopic
        config = {"max.message.bytes": str(limit)}
        made = self.admin.create_topics([new(t, PARTITIONS, 1, config=config) for t in topics])
        for each in made.values():
            each.result(30)
        while not set(topics) <= self.admin.list_topics(timeout=10).topics.keys():
            time.sleep(0.1)

    def limit(self, topic: str, size: int) -> None:
        """Let the records of a topic be as large as this."""
        admin: Any = import_module("confluent_kafka.admin")
        entry = admin.ConfigEntry(
            "max.message.bytes", str(size), incremental_operation=admin.AlterConfigOpType.SET
        )
        resource = admin.ConfigResource(
            admin.ResourceType.TOPIC, topic, incremental_configs=[entry]
        )
        for each in self.admin.incremental_alter_configs([resource]).values():
            each.result(30)

    def records(self, topic: str) -> int:
        """Number of records of a topic."""
        kafka: Any = import_module("confluent_kafka")
        reader = kafka.Consumer({"bootstrap.servers": self.address, "group.id": "counting"})
        places = [kafka.TopicPartition(topic, number) for number in range(PARTITIONS)]
        found = sum(reader.get_watermark_offsets(place, 30)[1] for place in places)
        reader.close()
        return int(found)


def broker(folder: Path) -> Broker:
    """A broker, not started, on a free port of this machine."""
    jars = TOOLS / "kafka"
    if not jars.is_dir():
        pytest.fail(f"{jars} is missing: run make scale-backends", pytrace=False)
    host = Host("kafka", "127.0.0.1", None)
    address, controller = host.free_address(), host.free_address()
    folder.mkdir(parents=True)
    properties = folder / "server.properties"
    properties.write_text(
        _PROPERTIES.format(broker=address, controller=controller, folder=folder, limit=LIMIT)
    )
    java = ["java", "-Xmx384m", "-cp", f"{jars}/*"]
    form = [*java, "kafka.tools.StorageTool", "format", "-t", str(uuid.uuid4()), "-c"]
    subprocess.run([*form, str(properties)], check=True, capture_output=True, timeout=120)
    admin: Any = import_module("confluent_kafka.admin").AdminClient
    program = Program(host, [*java, "kafka.Kafka", str(properties)], folder, "")
    return Broker(program, address, admin({"bootstrap.servers": address, "log_level": 0}))
