"""The names that the GenAI conventions have for our spans, with values that are known."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from pathlib import Path
from typing import Any

import anthropic

import otel_rollout
from otel_rollout import Reward, Workflow, reconstruct, record_reward, rollout
from otel_rollout import semconv as sc
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.workflows import run_workflows
from tests.kit.recording import Clients, Recording

PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
LABEL = "gen_ai.evaluation.score.label"


def root(recording: Recording, prefix: str = "invoke_agent") -> dict[str, Any]:
    (span,) = recording.spans_named(prefix)
    return dict(span.attributes or {})


def ask(clients: Clients, **options: Any) -> None:
    message: Any = {"role": "user", "content": "hi"}
    client = clients.sync(clients.serve("x"))
    client.chat.completions.create(model="m", messages=[message], **options)


def ask_claude(clients: Clients) -> None:
    url = clients.serve("x").base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        )


def test_the_provider_is_on_the_calls_alone(recording: Recording, clients: Clients):
    """Whose API was asked is on the span of the call; a rollout may ask several."""
    with rollout("x"):
        ask(clients)
        ask_claude(clients)
    assert PROVIDER not in root(recording)
    asked = {(span.attributes or {}).get(PROVIDER) for span in recording.spans}
    assert asked == {None, "openai", "anthropic"}


def test_the_conversation_is_the_rollout(recording: Recording):
    """Each rollout has a conversation id of its own: the rollout's."""
    with rollout("outer") as outer, rollout("inner") as inner:
        pass
    ids = {span.name: (span.attributes or {}).get(CONVERSATION) for span in recording.spans}
    assert ids == {"invoke_agent outer": outer.id, "invoke_agent inner": inner.id}


def test_a_workflow_has_its_name(recording: Recording):
    """It is that of an agent, as the conventions have it since workflows are invocations too."""

    class Solving(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            with rollout("solver"):
                pass

    asyncio.run(run_workflows(lambda: Solving(), [{"q": 1}]))
    workflow = root(recording, "invoke_workflow")
    name = recording.spans_named("invoke_workflow")[0].name.removeprefix("invoke_workflow ")
    assert workflow["gen_ai.agent.name"] == name
    assert CONVERSATION not in workflow
    assert "gen_ai.workflow.name" not in workflow | root(recording)


def test_a_label_is_on_the_event_and_comes_back(recording: Recording):
    """A reward's label is what was given: on the event, rebuilt, in JSON and in pickles."""
    with rollout("x") as trajectory:
        record_reward(1, label="pass")
        record_reward(0.5, name="format")
    record_reward(0.2, name="late", label="poor", trajectory=trajectory)
    events = [event for span in recording.spans for event in span.events]
    labels = [(event.attributes or {}).get(LABEL) for event in events]
    assert labels == ["pass", None, "poor"]
    (rebuilt,) = reconstruct(recording.spans)
    assert {r.name: r.label for r in rebuilt.all_rewards.all()} == {
        None: "pass",
        "format": None,
        "late": "poor",
    }
    reward = Reward(1, label="pass")
    assert Reward.from_dict(reward.to_dict()).label == "pass"
    assert pickle.loads(pickle.dumps(reward)).label == "pass"
    assert "label" not in Reward(1).to_dict()


def test_our_scope_names_the_schema(recording: Recording, clients: Clients):
    """Every span of ours is of the conventions' schema, so that backends can translate names."""
    with rollout("x"):
        ask(clients)
    scopes = [span.instrumentation_scope for span in recording.spans]
    ours = [scope for scope in scopes if scope is not None and scope.name == "otel_rollout"]
    schema = "https://opentelemetry.io/schemas/gen-ai/0.1.0"
    assert [scope.schema_url for scope in ours] == [schema] * 2


RELEASE = json.loads(Path(__file__).with_name("genai_conventions.json").read_text())
"""Names of the release that `SCHEMA_URL` is of, from its model files."""
WRITERS = ("record", "look", "spans", "workflows", "gateway", "wiring.py")
"""Where spans, events and metrics are written."""


def named_in(*rooms: str) -> set[str]:
    """The constants of `semconv` that these rooms name."""
    package = Path(otel_rollout.__file__).parent
    files = [f for room in rooms for f in [package / room, *(package / room).rglob("*.py")]]
    texts = [file.read_text() for file in files if file.is_file()]
    return {name for text in texts for name in re.findall(r"\bsc\.(\w+)", text)}


def test_all_that_is_written_is_in_the_release():
    """Each attribute, event, metric and operation of `gen_ai.*`; ours have another prefix."""
    values = {name: getattr(sc, name) for name in named_in(*WRITERS)}
    assert len(values) > 100
    written = {v for v in values.values() if isinstance(v, str) and v.startswith(sc.GEN_AI)}
    known = {*RELEASE["attributes"], *RELEASE["events"], *RELEASE["metrics"], sc.GEN_AI}
    assert written - known == set()
    assert len(written) > 20
    operations = {v for name, v in values.items() if name.startswith("OPERATION_")}
    assert operations - {*RELEASE["operations"]} == {sc.OPERATION_EVALUATE, sc.OPERATION_EXCHANGE}
    assert sc.SCHEMA_URL.endswith(f"/gen-ai/{RELEASE['release']}")


def test_spans_have_what_the_release_gives_them(recording: Recording, clients: Clients):
    """An invocation has no more of `gen_ai.*` than that; nor has a tool's span."""
    client = clients.sync(clients.serve([Reply(tool_calls=[ToolCall("add")]), "4"]))
    messages: list[Any] = [{"role": "user", "content": "2 + 2?"}]
    with rollout("x", task_id="t", policy_version=1) as trajectory:
        said = client.chat.completions.create(model="m", messages=messages).choices[0].message
        call = (said.tool_calls or [])[0].id
        messages += [said, {"role": "tool", "tool_call_id": call, "content": "4"}]
        client.chat.completions.create(model="m", messages=messages, temperature=0.5)
        trajectory.reward = 1.0
    for prefix, kind in (("invoke_agent", "invocation span"), ("execute_tool", "tool span")):
        (span,) = recording.spans_named(prefix)
        named = {name for name in span.attributes or {} if name.startswith(sc.GEN_AI)}
        assert named - {*RELEASE[kind]} == set()
        assert len(named) > 4
