"""The names that the GenAI conventions have for our spans, with values that are known."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import anthropic
import openai
import pytest

from otel_rollout import Reward, Workflow, reconstruct, record_reward, rollout
from otel_rollout.testing import Reply
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


def test_the_provider_is_whose_api_was_asked(recording: Recording, clients: Clients):
    """A rollout that asked by OpenAI's API says so, whoever serves it."""
    with rollout("x"):
        ask(clients)
        ask(clients)
    assert root(recording)[PROVIDER] == "openai"


def test_anthropics_api_is_anthropics(recording: Recording, clients: Clients):
    """The Messages API has a provider of its own."""
    with rollout("x"):
        ask_claude(clients)
    assert root(recording)[PROVIDER] == "anthropic"


def test_no_provider_is_made_up(recording: Recording, clients: Clients):
    """Without a call, or with calls of two APIs, the rollout has no provider."""
    with rollout("none"):
        pass
    with rollout("two"):
        ask(clients)
        ask_claude(clients)
    for span in recording.spans_named("invoke_agent"):
        assert PROVIDER not in (span.attributes or {})


def test_llama_cpps_own_endpoint_is_not_openais(recording: Recording, clients: Clients):
    """A path that only another server has is nobody's that the conventions name."""
    client = clients.sync(clients.serve("x"))
    with rollout("x"), pytest.raises(openai.NotFoundError):
        client.post("/completion", body={"prompt": "hi"}, cast_to=object)
    assert PROVIDER not in root(recording)


def test_the_conversation_is_the_rollout(recording: Recording):
    """Each rollout has a conversation id of its own: the rollout's."""
    with rollout("outer") as outer, rollout("inner") as inner:
        pass
    ids = {span.name: (span.attributes or {}).get(CONVERSATION) for span in recording.spans}
    assert ids == {"invoke_agent outer": outer.id, "invoke_agent inner": inner.id}


def test_a_workflow_has_its_name(recording: Recording):
    """`invoke_workflow` spans have the workflow's name, and agents' spans do not."""

    class Solving(Workflow):
        async def run(self, task: Any, uid: str, **_: Any) -> None:
            with rollout("solver"):
                pass

    asyncio.run(run_workflows(lambda: Solving(), [{"q": 1}]))
    workflow = root(recording, "invoke_workflow")
    name = recording.spans_named("invoke_workflow")[0].name.removeprefix("invoke_workflow ")
    assert workflow["gen_ai.workflow.name"] == name
    assert CONVERSATION not in workflow
    assert "gen_ai.workflow.name" not in root(recording)


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
    assert [scope.schema_url for scope in ours] == ["https://opentelemetry.io/schemas/1.41.0"] * 2


def test_a_call_that_fails_was_asked_all_the_same(recording: Recording, clients: Clients):
    """The provider is that of the request, whatever became of it."""
    message: Any = {"role": "user", "content": "hi"}
    client = clients.sync(clients.serve(Reply("x", cut_after=1)))
    with rollout("x"), pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=[message])
    assert root(recording)[PROVIDER] == "openai"
