"""Messages to send, tools to offer, and histories written as a table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from otel_rollout import Completion, Trajectory
from tests.kit.calling import done, read

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: " + "what it does, at length. " * 20,
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
            "strict": True,
        },
    }
    for name in ("add", "find")
]


async def chat(client: Any, **request: Any) -> Any:
    """Ask; a streamed reply is read to its end."""
    request = {"model": "m", "messages": ASK, **request}
    result = await done(client.chat.completions.create(**request))
    return await read(result) if request.get("stream") else result


Message = dict[str, Any]


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


TITLE = (
    system("You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>"),
    user("Generate a title for this conversation:\n"),
    user("What is the capital of France?"),
)
"""What opencode asks beside its agent on every run."""
TASK = (system("You are an agent."), user("What is the capital of France?"))
"""What an agent asks."""


def _text(message: Message) -> str:
    content = message.get("content", message.get("output")) or ""
    if isinstance(content, list):
        content = "|".join(str(part.get("text")) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if message.get("type") == "function_call":
        calls = [message]
    return " ".join([*([content] if content else []), *(f"{c['name']}()" for c in calls)])


def table(trajectory: Trajectory) -> list[str]:
    """The histories, one line each, of which `docs` is this.

    `user hi` is a message; `0* Paris` what completion 0 sampled, trained here; `0 Paris` the same
    as context; `0! Paris` the same where its reasoning was dropped. Asserts that each trainable
    completion is trained exactly once.
    """
    number = {(c.span_id, c.choice_index): n for n, c in enumerate(trajectory.completions)}
    trained: Counter[Completion | None] = Counter()
    lines: list[str] = []
    for history in trajectory.histories:
        cells: list[str] = []
        for item in history.items:
            who = item.message.get("role") or item.message["type"]
            if item.completion is not None:
                key = item.completion.span_id, item.completion.choice_index
                who = f"{number[key]}{'*' * item.trainable}{'!' * item.is_break}"
            cells.append(f"{who} {_text(item.message)}".strip())
        lines.append(", ".join(cells))
        # What one reply of the Responses API sampled may be several items.
        trained.update({item.completion for item in history.items if item.trainable})
        assert [item.message for item in history.items] == history.messages()
    assert {c: trained[c] for c in trajectory.completions} == {
        c: int(c.trainable) for c in trajectory.completions
    }
    return lines


async def ask(client: Any, *messages: Any, **options: Any) -> Any:
    """The message that the model says; of several choices all."""
    reply = await chat(client, messages=list(messages), **options)
    if options.get("stream"):
        return said("".join(c.choices[0].delta.content or "" for c in reply if c.choices))
    replies = [choice.message for choice in reply.choices]
    return replies[0] if len(replies) == 1 else replies
