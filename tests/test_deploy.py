"""deploy/: the files that users take fit each other, and what they start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from otel_rollout.command.cli import command_parser

yaml: Any = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"\$\{env:(\w+)")


def variables(name: str) -> set[str]:
    """The environment variables of a collector's configuration."""
    return set(VARIABLE.findall((DEPLOY / name).read_text()))


def services() -> dict[str, Any]:
    """The services of compose.yaml."""
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def containers() -> list[Any]:
    """The containers of kubernetes.yaml."""
    every = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    specs = [each["spec"]["template"]["spec"] for each in every if "template" in each["spec"]]
    return [container for spec in specs for container in spec["containers"]]


def commands() -> list[list[str]]:
    """The words after `otel-rollout` in both."""
    composed = [each["command"] for each in services().values() if each["image"] == "otel-rollout"]
    return composed + [each["args"] for each in containers() if each["image"] == "otel-rollout"]


@pytest.mark.parametrize("name", ["agent", "kafka"])
def test_nothing_is_given_up_and_all_waits_on_disk(name: str) -> None:
    """The settings whose defaults lose data (docs/scale.md)."""
    config = yaml.safe_load((DEPLOY / f"collector-{name}.yaml").read_text())
    (exporter,) = config["exporters"].values()
    assert exporter["retry_on_failure"]["max_elapsed_time"] == "0s"
    assert exporter["sending_queue"]["storage"] == "file_storage"
    assert config["extensions"]["file_storage"]["fsync"] is True
    if name == "agent":
        assert exporter["retry_on_failure"]["enabled"]
        assert exporter["sending_queue"]["enabled"]
        inner = exporter["protocol"]["otlp"]
        assert not inner["retry_on_failure"]["enabled"]
        assert not inner["sending_queue"]["enabled"]
    else:
        taken = config["receivers"]["otlp"]["protocols"]["grpc"]["max_recv_msg_size_mib"] << 20
        assert exporter["producer"]["max_message_bytes"] > taken
        assert exporter["producer"]["required_acks"] == -1


def test_collectors_get_variables_that_they_have() -> None:
    """Each variable is in the configuration that the same service mounts."""
    for each in services().values():
        if "collector" in each["image"]:
            (mounted,) = [v.split(":")[0] for v in each["volumes"] if v.startswith("./")]
            assert set(each["environment"]) <= variables(mounted.removeprefix("./"))
    (collector,) = [each for each in containers() if "collector" in each["image"]]
    assert {row["name"] for row in collector["env"]} <= variables("collector-agent.yaml")


def test_the_commands_are_those_of_the_parser() -> None:
    """`receive` and `rebuild`, with options that they have."""
    verbs = {command_parser().parse_args(words).verb for words in commands()}
    assert verbs == {"receive", "rebuild"}
    assert len(commands()) == 5


def test_the_versions_are_those_that_tests_run() -> None:
    """Images of the collector and of Kafka, as tools/ builds them."""
    texts = "".join((DEPLOY / name).read_text() for name in ("compose.yaml", "kubernetes.yaml"))
    (collector,) = set(re.findall(r"collector-contrib:([\d.]+)", texts))
    (kafka,) = set(re.findall(r"apache/kafka:([\d.]+)", texts))
    assert f"v{collector}\n" in (ROOT / "tools" / "otelcol" / "go.mod").read_text()
    assert f"<version>{kafka}</version>" in (ROOT / "tools" / "kafka" / "pom.xml").read_text()
