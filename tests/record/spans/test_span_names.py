"""Names of spans: they tell rollouts, tools and recordings apart, and there are few of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from otel_rollout import (
    Reward,
    Step,
    Trajectory,
    Workflow,
    continue_rollout,
    get_current_trajectory,
    propagate,
    reconstruct,
    rollout,
    tool,
)
from otel_rollout.record.span_names import recording_name
from otel_rollout.record.state import process_state
from otel_rollout.spans import SpanRecord, as_record
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.workflows import run_workflows
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording


@pytest.fixture(autouse=True)
def no_tasks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that other tests put into names do not count."""
    monkeypatch.setattr(process_state, "tasks_in_names", set[str]())


def names(recording: Recording, prefix: str) -> list[str]:
    return [span.name for span in recording.spans_named(prefix)]


async def test_rollouts_of_one_name_are_numbered(recording: Recording):
    """Those beside each other, in the order in which they begin; each rollout counts its own."""

    @rollout
    async def researcher() -> None:
        await asyncio.sleep(0)

    with rollout("lead"):
        await asyncio.gather(researcher(), researcher(), researcher())
        with rollout("writer"):
            await researcher()
    with rollout("lead"):
        await researcher()
    assert sorted(names(recording, "invoke_agent")) == [
        "invoke_agent lead",
        "invoke_agent lead",
        "invoke_agent researcher",
        "invoke_agent researcher",
        "invoke_agent researcher",
        "invoke_agent researcher #2",
        "invoke_agent researcher #3",
        "invoke_agent writer",
    ]


def test_a_task_of_its_own_is_in_the_name_of_a_nested_rollout(recording: Recording):
    """Not that of the rollout around it, and not at the top, where every task would be a name."""
    with rollout("lead", task_id="t1"):
        for task in ("paris", "rome", "rome", "t1", 7, "x" * 100):
            with rollout("researcher", task_id=task):
                pass
    assert names(recording, "invoke_agent") == [
        "invoke_agent researcher [paris]",
        "invoke_agent researcher [rome]",
        "invoke_agent researcher [rome] #2",
        "invoke_agent researcher",
        "invoke_agent researcher [7]",
        f"invoke_agent researcher [{'x' * 39}…]",
        "invoke_agent lead",
    ]


def test_there_are_few_names(recording: Recording):
    """However many rollouts, tasks and tools there are: backends list operations by name."""
    for lead in range(3):
        with rollout("lead"):
            for number in range(200):
                with rollout("inner", task_id=f"{lead}-{number}"), tool("search"):
                    pass
                with rollout("other"), tool("look"):
                    pass
            for _ in range(100):
                with tool("look"):
                    pass
    found = {span.name for span in recording.spans}
    assert len(found) < 64 + 4 * 34
    assert "invoke_agent inner [0-63]" in found
    assert "invoke_agent inner [0-64]" not in found
    assert "execute_tool look #32+" in found


class Guessing(Workflow):
    """Two trajectories that were built by hand, and two rollouts, all with one name."""

    async def run(self, task: Any, uid: str, **_: Any) -> None:
        for _number in range(2):
            with rollout("guesser"):
                pass
            step = Step(chat_completions=[{"role": "user", "content": "2 + 2?"}])
            self.commit(trajectory=Trajectory(name="guesser", steps=[step]))


async def test_rollouts_of_a_workflow_are_numbered(recording: Recording):
    """Those that ran, and those that agents built by hand; the run's task is not theirs alone."""
    await run_workflows(lambda: Guessing(), [{"q": 1}])
    assert names(recording, "invoke_agent") == [
        "invoke_agent guesser",
        "invoke_agent guesser #2",
        "invoke_agent guesser #3",
        "invoke_agent guesser #4",
    ]


CALLS = [
    ToolCall("search", '{"q": 1}', id="call_1"),
    ToolCall("look", "{}", id="call_2"),
    ToolCall("search", '{"q": 2}', id="call_3"),
]


def turns(client: Any, run: Any) -> None:
    """A turn with three calls, one with a single call, and the last word."""
    messages: list[Any] = [user("go")]
    while True:
        reply = client.chat.completions.create(model="m", messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            run(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "x"})


@pytest.mark.parametrize("by", ["inferred", "tool"])
def test_calls_of_one_reply_are_numbered(recording: Recording, clients: Clients, by: str):
    """By their place in the reply, whoever draws them; the next reply starts again."""
    replies = [Reply(tool_calls=CALLS), Reply(tool_calls=[ToolCall("search", "{}", id="c4")]), "x"]
    client = clients.sync(clients.serve(replies))

    def run(call: Any) -> None:
        if by == "tool":
            with tool(call.function.name, call_id=call.id):
                pass

    with rollout("agent"):
        turns(client, run)
    assert names(recording, "execute_tool") == [
        "execute_tool search",
        "execute_tool look",
        "execute_tool search #2",
        "execute_tool search",
    ]
    tools = {(span.attributes or {})["gen_ai.tool.name"] for span in recording.spans_named("exec")}
    assert tools == {"search", "look"}


def test_a_tool_outside_of_a_rollout_has_no_number(recording: Recording):
    """Nothing tells which of them stand beside each other."""
    for _ in range(2):
        with tool("search"):
            pass
    assert names(recording, "execute_tool") == ["execute_tool search"] * 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/chat/completions", "/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions?api-version", None),
        ("/models/gemini-2.5-flash:generateContent", "/models/gemini-2.5-flash:generateContent"),
        ("/model/a.claude-3-5-sonnet-20241022-v2:0/converse", None),
        ("/responses/resp-1", "/responses/{id}"),
        ("/v1/responses/1", "/v1/responses/{id}"),
        ("/v1/messages/batches/msgbatch_013Zva2CMHLN/results", "/v1/messages/batches/{id}/results"),
        ("/jobs/550e8400-e29b-41d4-a716-446655440000", "/jobs/{id}"),
        ("/threads/12345/runs", "/threads/{id}/runs"),
    ],
)
def test_a_recording_is_named_after_the_path(path: str, name: str | None):
    """Without the ids in it, which would make a name of every call."""
    shown = path.partition("?")[0] if name is None else name
    assert recording_name(path) == f"recording {shown}"


@pytest.mark.not_replayed("the rollout had ended: its trajectory has nothing of the part")
def test_another_process_says_so(recording: Recording, clients: Clients):
    """Its span is no rollout's own, and its name says where it comes from."""
    with rollout("agent"):
        carrier = propagate()
    with continue_rollout(carrier):
        pass
    assert names(recording, "continue") == ["continue_rollout in another process"]


def cut(record: SpanRecord, **changes: Any) -> SpanRecord:
    """The span with its reward cut by a limit on lengths."""
    attributes = {**record.attributes, "rollout.evaluation": '{"na'}
    return SpanRecord(
        changes.get("name", record.name),
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        record.start_time_ns,
        record.end_time_ns,
        {key: value for key, value in attributes.items() if key not in changes.get("without", ())},
    )


@pytest.mark.not_replayed("an attribute is cut")
@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, {"style": 1.0}),
        ({"name": "renamed by a backend"}, {"style": 1.0}),
        ({"without": ["gen_ai.evaluation.name"]}, {}),
    ],
    ids=["as it is", "another name", "without its attribute"],
)
def test_no_reader_needs_the_name_of_a_late_reward(
    recording: Recording, changes: Any, known: dict[str, float]
):
    """One that cannot be read makes unknown what it may have replaced, and nothing else."""
    with rollout("agent"):
        trajectory = get_current_trajectory()
        trajectory.rewards["format"] = Reward(1.0, name="format")
        trajectory.rewards["style"] = Reward(1.0, name="style")
    trajectory.rewards["format"] = Reward(0.0, name="format")
    assert names(recording, "evaluate") == ["evaluate rollout: reward format"]
    spans = [as_record(span) for span in recording.spans]
    (rebuilt,) = reconstruct(
        [cut(s, **changes) if s.name.startswith("evaluate") else s for s in spans]
    )
    assert dict(rebuilt.rewards) == known
