"""Every query of docs/jaeger.md, asked of the real Jaeger: what it finds, and what it does not."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import otel_rollout
from otel_rollout import Reward, Trajectory, record_reward, rollout, tool
from otel_rollout.testing import ModelServer, Raw

if TYPE_CHECKING:
    from tests.backends.programs import Jaeger

pytestmark = pytest.mark.backend
PAGE = Path(__file__).parents[2] / "docs" / "jaeger.md"
SERVICE = "math-agent"
ASK: Any = [{"role": "user", "content": "where?"}]


@dataclass(frozen=True)
class Query:
    """A row of the page's table."""

    operation: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    min_duration: str = ""

    def unlike(self) -> Iterator[Query]:
        """The query with one value of it changed."""
        if self.operation:
            yield Query(self.operation + "x", self.tags, self.min_duration)
        if self.min_duration:
            yield Query(self.operation, self.tags, "1h")
        for number, (name, value) in enumerate(self.tags):
            tags = (*self.tags[:number], (name, value + "9"), *self.tags[number + 1 :])
            yield Query(self.operation, tags, self.min_duration)


def rows() -> dict[str, Query]:
    """The queries of the page, by what they look for."""
    found: dict[str, Query] = {}
    table = PAGE.read_text().partition("| what you look for |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        what, *cells = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        operation, tags, min_duration = cells
        pairs = tuple(re.findall(r"(\S+?)=(\S+)", tags))
        found[what] = Query(operation, pairs, min_duration)
    return found


EXPECTED = {
    "rollouts that failed": {"failed", "late"},
    "failed with one kind of exception": {"failed"},
    "took too long and gave up": {"late"},
    "were cancelled": {"cancelled"},
    "the best of a group": {"best"},
    "a named reward": {"best"},
    "a reward that came later": {"second"},
    "the best of a group by a reward that came later": {"second"},
    "what one version of the weights did": {"best", "second"},
    "the slow ones": {"slow"},
    "all samples of one task": {"best", "second"},
    "one of these samples": {"second"},
    "rollouts of so many model calls": {"second"},
    "what a sub-agent did": {"lead"},
    "the second one of its kind": {"lead"},
    "the tool call that failed": {"lead"},
    "the second of parallel calls of a tool": {"lead"},
    "the model call that was refused": {"refused"},
    "a stream that was not read to its end": {"left"},
}
"""The rollouts that each row finds."""


def play(client: openai.OpenAI) -> dict[str, Trajectory]:
    """Rollouts of all the kinds that the page tells of."""
    played: dict[str, Trajectory] = {}

    def ending(name: str, error: BaseException) -> None:
        with pytest.raises(type(error)), rollout("solve") as played[name]:
            raise error

    group: Any = {"task_id": "t1", "group_id": "g1", "policy_version": 7}
    with rollout("solve", **group, sample_index=0) as played["best"]:
        client.chat.completions.create(model="m", messages=ASK)
        record_reward(1)
        record_reward(0.5, name="format")
    with rollout("solve", **group, sample_index=1) as played["second"]:
        for _ in range(2):
            client.chat.completions.create(model="m", messages=ASK)
        record_reward(0.25)
    played["second"].rewards["judge"] = Reward(2, name="judge")
    ending("failed", ValueError("no such city"))
    ending("late", TimeoutError("too late"))
    ending("cancelled", asyncio.CancelledError())
    with rollout("solve") as played["slow"]:
        time.sleep(3.1)
    with rollout("lead") as played["lead"]:
        for _ in range(2):
            with rollout("researcher", task_id="paris"), tool("search"), tool("search"):
                pass
        with pytest.raises(LookupError), tool("search"):
            raise LookupError("nothing found")
    with rollout("solve") as played["refused"], pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="refuse", messages=ASK)
    with rollout("solve") as played["left"]:
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        next(iter(stream))
        stream.close()
    return played


Find = Callable[[Query], set[str]]


@pytest.fixture(scope="module")
def find(jaeger: Jaeger) -> Find:
    """Asks Jaeger, which has the rollouts; gives the names of those that were found."""

    def reply(request: dict[str, Any]) -> Any:
        return Raw(400, b'{"error": {"message": "no"}}') if request["model"] == "refuse" else "x"

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", jaeger.otlp_http)
        otel_rollout.configure(service_name=SERVICE)
        with (
            ModelServer(reply, token_ids=True, logprobs=True) as server,
            openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client,
        ):
            played = play(client)
        assert otel_rollout.shutdown()
    names = {trajectory.trace_id: name for name, trajectory in played.items()}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(query: Query) -> set[str]:
        fields = {
            "service": SERVICE,
            "limit": "20",
            "lookback": "1h",
            "operation": query.operation,
            "tags": json.dumps(dict(query.tags)) if query.tags else "",
            "minDuration": query.min_duration,
        }
        asked = urllib.parse.urlencode({key: value for key, value in fields.items() if value})
        with opener.open(f"{jaeger.api_url}/api/traces?{asked}", timeout=30) as response:
            return {names[trace["traceID"]] for trace in json.load(response)["data"]}

    deadline = time.monotonic() + 20
    while ask(Query()) != set(played) and time.monotonic() < deadline:
        time.sleep(0.1)
    return ask


@pytest.mark.parametrize("what", list(rows()))
def test_a_query_of_the_page(find: Find, what: str) -> None:
    """It finds what it says, and with any value of it changed it finds nothing."""
    query = rows()[what]
    assert find(query) == EXPECTED[what]
    for unlike in query.unlike():
        assert find(unlike) == set(), unlike


def test_every_row_is_known() -> None:
    """No row of the page is left out here."""
    assert rows().keys() == EXPECTED.keys()


@pytest.mark.parametrize(
    "tags",
    [
        {"rollout.reward": "1.0"},
        {"rollout.reward": ">0"},
        {"rollout.group_id": "g1", "gen_ai.tool.name": "search"},
    ],
)
def test_what_jaeger_cannot_do(find: Find, tags: dict[str, str]) -> None:
    """What the page says of numbers, errors and tags on several spans; a newer Jaeger may learn."""
    assert find(Query(tags=tuple(tags.items()))) == set()


def test_error_true_is_not_the_status(find: Find) -> None:
    """It finds spans with an attribute of that name, not those that the page marks."""
    assert find(Query(tags=(("error", "true"),))).isdisjoint({"failed", "late", "refused", "lead"})


def test_a_reward_in_the_name_is_an_operation(
    jaeger: Jaeger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `reward_in_name` Jaeger lists it among the operations of the service."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", jaeger.otlp_http)
    otel_rollout.configure(service_name="named", reward_in_name=True)
    with rollout("solve"):
        record_reward(1)
    assert otel_rollout.shutdown()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 20
    operations: set[str] = set()
    named = "invoke_agent solve [1.00]"
    while named not in operations and time.monotonic() < deadline:
        with opener.open(f"{jaeger.api_url}/api/operations?service=named", timeout=30) as response:
            operations = {row["name"] for row in json.load(response)["data"] or ()}
    assert operations == {named, "rollout started"}
